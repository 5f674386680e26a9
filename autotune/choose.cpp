#include "autotune/choose.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>

namespace wyvern {
namespace {

/// Cheaper first; equal sums by text, so that the order is the same in every run.
bool precedes(const RankedPlan& a, const RankedPlan& b) {
  if (a.sum_us != b.sum_us) return a.sum_us < b.sum_us;
  return canonical_text(a.plan) < canonical_text(b.plan);
}

void keep_best(std::vector<RankedPlan>& plans, std::size_t count) {
  std::sort(plans.begin(), plans.end(), precedes);
  if (plans.size() > count) plans.resize(count);
}

}  // namespace

Footprint& Footprint::operator+=(const Footprint& other) {
  spill_bytes += other.spill_bytes;
  block_bytes += other.block_bytes;
  code_bytes += other.code_bytes;
  return *this;
}

Footprint footprint(const SearchSpace& space, const Results& results, const Candidate& candidate) {
  constexpr std::int64_t kRegisterBytes = 4;
  const Group& group = space.groups[candidate.group];
  const Launch launch = group.launches.empty() ? Launch() : group.launches[candidate.config];
  Footprint found;
  found.block_bytes = launch.shared_bytes;
  if (const auto& resources = results.resources(candidate)) {
    found.spill_bytes = resources->spill_bytes;
    found.block_bytes +=
        resources->shared_bytes + kRegisterBytes * launch.threads * resources->registers;
    found.code_bytes = resources->code_bytes;
  }
  return found;
}

std::optional<std::size_t> fastest_config(const Results& results, std::size_t group) {
  std::optional<std::size_t> fastest;
  for (std::size_t i = 0; i < results.all()[group].size(); ++i) {
    const double median = results.timing({group, i}).median;
    if (median > 0 && (!fastest || median < results.timing({group, *fastest}).median)) fastest = i;
  }
  return fastest;
}

std::optional<std::size_t> best_config(const SearchSpace& space, const Results& results,
                                       std::size_t group) {
  const Group& own = space.groups[group];
  const std::optional<std::size_t> fastest = fastest_config(results, group);
  if (!fastest) return {};
  const auto in_tie = [&](std::size_t i) {
    const Timing& timing = results.timing({group, i});
    return timing.median > 0 && tied(timing, results.timing({group, *fastest}));
  };
  if (in_tie(own.default_config)) return own.default_config;
  std::optional<std::size_t> chosen;
  for (std::size_t i = 0; i < own.configs.size(); ++i)
    if (in_tie(i) && (!chosen || footprint(space, results, {group, i}) <
                                     footprint(space, results, {group, *chosen})))
      chosen = i;
  return chosen;
}

std::vector<RankedPlan> best_plans(const SearchSpace& space, const Layer& layer,
                                   const Results& results, std::size_t count) {
  std::vector<std::vector<RankedPlan>> reaching(space.uses + 1);  // plans of uses [0, i)
  reaching.front().emplace_back();
  for (std::size_t use = 0; use < space.uses; ++use) {
    keep_best(reaching[use], count);
    for (const Edge& edge : layer.edges) {
      if (edge.first != use) continue;
      const auto config = best_config(space, results, edge.group);
      if (!config) continue;
      const Group& group = space.groups[edge.group];
      for (RankedPlan plan : reaching[use]) {
        plan.plan.push_back({group.template_id, group.configs[*config]});
        plan.candidates.push_back({edge.group, *config});
        plan.sum_us += results.timing({edge.group, *config}).median;
        reaching[edge.last].push_back(std::move(plan));
      }
    }
  }
  keep_best(reaching.back(), count);
  return std::move(reaching.back());
}

std::vector<RankedPlan> best_plans(const SearchSpace& space, const Results& results,
                                   std::size_t count) {
  std::vector<RankedPlan> plans;
  for (const Layer& layer : space.layers)
    for (RankedPlan& plan : best_plans(space, layer, results, count))
      plans.push_back(std::move(plan));
  keep_best(plans, count);
  return plans;
}

std::vector<double> costs_through(const SearchSpace& space, const Results& results) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<double> through(space.groups.size(), kNone);
  for (const Layer& layer : space.layers) {
    std::vector<double> before(space.uses + 1, kNone), after(space.uses + 1, kNone);
    before.front() = after.back() = 0;
    const auto cost = [&](const Edge& edge) {
      const double bar = results.bar(edge.group);
      return bar > 0 ? bar : kNone;
    };
    for (std::size_t use = 0; use < space.uses; ++use)
      for (const Edge& edge : layer.edges)
        if (edge.first == use)
          before[edge.last] = std::min(before[edge.last], before[use] + cost(edge));
    for (std::size_t use = space.uses; use > 0; --use)
      for (const Edge& edge : layer.edges)
        if (edge.last == use)
          after[edge.first] = std::min(after[edge.first], after[use] + cost(edge));
    for (const Edge& edge : layer.edges)
      through[edge.group] = std::min(
          through[edge.group], before[edge.first] + results.bar(edge.group) + after[edge.last]);
  }
  return through;
}

std::optional<std::size_t> choose_winner(std::span<const PlanTiming> timings, const Plan& fallback,
                                         const Plan& incumbent) {
  const auto ran = [](const PlanTiming& timing) {
    return timing.status == Status::ok && !timing.samples.empty();
  };
  const auto at = std::find_if(timings.begin(), timings.end(), [&](const PlanTiming& timing) {
    return timing.plan == fallback && ran(timing);
  });
  const PlanTiming* const base = at == timings.end() ? nullptr : &*at;
  const auto cost = [&](std::size_t i) {
    return base != nullptr ? ratio_in_turn(timings[i].samples, base->samples)
                           : summarize(timings[i].samples).median;
  };
  std::vector<std::size_t> better;  // than the default
  for (std::size_t i = 0; i < timings.size(); ++i)
    if (ran(timings[i]) && (base == nullptr || beats(timings[i].samples, base->samples)))
      better.push_back(i);
  if (better.empty()) {
    if (base == nullptr) return {};
    return static_cast<std::size_t>(base - timings.data());
  }
  const std::size_t fastest = *std::ranges::min_element(better, {}, cost);
  const auto rank = [&](std::size_t i) {
    return std::tuple(timings[i].plan != incumbent, timings[i].footprint);
  };
  std::size_t chosen = fastest;
  for (const std::size_t i : better)
    if (i != fastest && tied_in_turn(timings[i].samples, timings[fastest].samples) &&
        (rank(i) < rank(chosen) || (rank(i) == rank(chosen) && i < chosen)))
      chosen = i;
  return chosen;
}

}  // namespace wyvern
