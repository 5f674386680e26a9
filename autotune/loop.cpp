#include "autotune/loop.hpp"

#include <algorithm>

#include "autotune/choose.hpp"

namespace wyvern {
namespace {

std::int64_t decided(const TuneCounts& counts) {
  return counts.ok + counts.wrong + counts.crashed + counts.timeout + counts.rejected +
         counts.illegal + counts.failed + counts.unjudged;
}

void report(const SearchSpace& space, const Results& results, const LoopLimits& limits,
            const Candidate& candidate, std::size_t left) {
  if (!limits.progress) return;
  const TuneCounts counts = count(space, results);
  TuneProgress progress;
  progress.done = decided(counts);
  progress.total = progress.done + static_cast<std::int64_t>(left);
  progress.elapsed_s = limits.elapsed_s();
  const double ran = static_cast<double>(std::max<std::int64_t>(progress.done - counts.reused, 1));
  progress.remaining_s = std::clamp(progress.elapsed_s / ran * static_cast<double>(left), 0.0,
                                    std::max(limits.deadline_s - progress.elapsed_s, 0.0));
  const std::vector<RankedPlan> best = best_plans(space, results, 1);
  if (!best.empty()) progress.best_us = best.front().sum_us;
  progress.candidate = describe(space, candidate);
  progress.status = to_string(results.find(candidate)->status);
  limits.progress(progress);
}

}  // namespace

LoopEnd run_search(const SearchSpace& space, const Search& search, Laboratory& laboratory,
                   const LoopLimits& limits, Results& results) {
  const auto interrupted = [&] { return limits.interrupted && limits.interrupted(); };
  for (;;) {
    const std::vector<Candidate> round = search.next_round(results);
    if (round.empty()) return {true, false};
    std::vector<Candidate> unknown;
    for (const Candidate& candidate : round) {
      std::optional<Outcome> outcome = limits.force ? std::nullopt : laboratory.recall(candidate);
      if (outcome)
        results.put(candidate, std::move(*outcome));
      else
        unknown.push_back(candidate);
    }
    if (!unknown.empty() && limits.elapsed_s() < limits.deadline_s) laboratory.announce(unknown);
    for (std::size_t i = 0; i < unknown.size(); ++i) {
      if (interrupted()) return {false, true};
      if (limits.elapsed_s() >= limits.deadline_s) return {false, false};
      std::optional<Outcome> outcome =
          laboratory.measure(unknown[i], results.bar(unknown[i].group));
      if (!outcome) return {false, interrupted()};
      results.put(unknown[i], std::move(*outcome));
      report(space, results, limits, unknown[i], unknown.size() - i - 1);
    }
  }
}

TuneCounts count(const SearchSpace& space, const Results& results) {
  TuneCounts counts;
  counts.space = static_cast<std::int64_t>(space.size());
  for (const auto& group : results.all())
    for (const auto& outcome : group) {
      if (!outcome) continue;
      if (outcome->ran) ++counts.measured;
      if (outcome->reused) ++counts.reused;
      switch (outcome->status) {
        case Status::ok: ++counts.ok; break;
        case Status::wrong: ++counts.wrong; break;
        case Status::crashed: ++counts.crashed; break;
        case Status::timeout: ++counts.timeout; break;
        case Status::rejected: ++counts.rejected; break;
        case Status::illegal: ++counts.illegal; break;
        case Status::failed: ++counts.failed; break;
        case Status::unjudged: ++counts.unjudged; break;
      }
    }
  return counts;
}

}  // namespace wyvern
