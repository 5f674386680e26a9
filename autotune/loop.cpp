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
            TuneProgress::Phase phase, const Candidate& candidate, std::size_t left) {
  if (!limits.progress) return;
  const TuneCounts counts = count(space, results);
  TuneProgress progress;
  progress.phase = phase;
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

namespace {

/// After so many results the search proposes a new round.
constexpr std::size_t kBatch = 16;
/// The fewest results for an estimate of a candidate's cost.
constexpr std::size_t kFewest = 4;

/// One run of run_search().
class Loop {
 public:
  Loop(const SearchSpace& space, const Search& search, Laboratory& laboratory,
       const LoopLimits& limits, Results& results)
      : space_(space),
        search_(search),
        laboratory_(laboratory),
        limits_(limits),
        results_(results),
        start_s_(limits.elapsed_s()) {}

  LoopEnd run() {
    for (;;) {
      std::vector<Candidate> round = search_.next_round(results_);
      const bool sweeping = round.empty();
      if (sweeping) round = search_.next_round(results_, room());
      if (round.empty()) {
        if (recall_rest()) continue;
        end_.complete = true;
        break;
      }
      const std::vector<Candidate> unknown = recall(round);
      if (unknown.size() < round.size() && !unknown.empty())
        continue;  // known results may reorder it
      const double before = limits_.elapsed_s();
      const std::size_t measured = measured_;
      const bool stop = !measure(
          unknown, sweeping ? TuneProgress::Phase::sweeping : TuneProgress::Phase::searching);
      if (sweeping) {
        end_.sweep_s += limits_.elapsed_s() - before;
        end_.sweep_configs += measured_ - measured;
      }
      if (stop) {
        // Configs that a sweep leaves out do not count: the search itself had finished.
        end_.complete = sweeping && !end_.interrupted;
        break;
      }
    }
    end_.exhaustive = search_.exhausted(results_);
    return end_;
  }

 private:
  bool interrupted() const { return limits_.interrupted && limits_.interrupted(); }

  /// How many candidates the rest of the budget pays for, by the mean cost so far.
  std::size_t room() const {
    const double now = limits_.elapsed_s();
    const double left = limits_.deadline_s - now;
    if (!limits_.sweep || measured_ < kFewest || left <= 0) return 0;
    const double each = (now - start_s_) / static_cast<double>(measured_);
    return each > 0 ? static_cast<std::size_t>(std::min(left / each, 1e9)) : 0;
  }

  /// Recalls results of an earlier sweep; false when there are none.
  bool recall_rest() {
    if (limits_.force || !limits_.sweep) return false;
    const std::vector<Candidate> rest = search_.next_round(results_, space_.size());
    return recall(rest).size() < rest.size();
  }

  /// The round's candidates without a stored result.
  std::vector<Candidate> recall(const std::vector<Candidate>& round) {
    std::vector<Candidate> unknown;
    for (const Candidate& candidate : round) {
      std::optional<Outcome> outcome = limits_.force ? std::nullopt : laboratory_.recall(candidate);
      if (outcome)
        results_.put(candidate, std::move(*outcome));
      else
        unknown.push_back(candidate);
    }
    return unknown;
  }

  /// Measures the first of them; false when interrupted.
  bool measure(const std::vector<Candidate>& unknown, TuneProgress::Phase phase) {
    if (limits_.elapsed_s() < limits_.deadline_s) laboratory_.announce(unknown);
    for (std::size_t i = 0; i < std::min(unknown.size(), kBatch); ++i) {
      if (interrupted()) {
        end_.interrupted = true;
        return false;
      }
      if (limits_.elapsed_s() >= limits_.deadline_s) return false;
      std::optional<Outcome> outcome =
          laboratory_.measure(unknown[i], results_.bar(unknown[i].group));
      if (!outcome) {
        end_.interrupted = interrupted();
        return false;
      }
      results_.put(unknown[i], std::move(*outcome));
      ++measured_;
      report(space_, results_, limits_, phase, unknown[i], unknown.size() - i - 1);
    }
    for (const Candidate& candidate : unknown)
      if (const auto resources = laboratory_.resources(candidate))
        results_.learn(candidate, *resources);
    return true;
  }

  const SearchSpace& space_;
  const Search& search_;
  Laboratory& laboratory_;
  const LoopLimits& limits_;
  Results& results_;
  const double start_s_;
  std::size_t measured_ = 0;
  LoopEnd end_;
};

}  // namespace

LoopEnd run_search(const SearchSpace& space, const Search& search, Laboratory& laboratory,
                   const LoopLimits& limits, Results& results) {
  return Loop(space, search, laboratory, limits, results).run();
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
