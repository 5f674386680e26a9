#include "autotune/choose.hpp"

#include <algorithm>
#include <limits>
#include <string>

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

std::optional<std::size_t> best_config(const SearchSpace& space, const Results& results,
                                       std::size_t group) {
  const Group& own = space.groups[group];
  std::optional<std::size_t> fastest;
  for (std::size_t i = 0; i < own.configs.size(); ++i) {
    const double median = results.timing({group, i}).median;
    if (median > 0 && (!fastest || median < results.timing({group, *fastest}).median)) fastest = i;
  }
  if (!fastest) return {};
  const auto in_tie = [&](std::size_t i) {
    const Timing& timing = results.timing({group, i});
    return timing.median > 0 && tied(timing, results.timing({group, *fastest}));
  };
  if (in_tie(own.default_config)) return own.default_config;
  std::size_t chosen = *fastest;
  for (std::size_t i = 0; i < own.configs.size(); ++i)
    if (in_tie(i) && own.configs[i].to_string() < own.configs[chosen].to_string()) chosen = i;
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
        plan.groups.push_back(edge.group);
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

std::optional<std::size_t> choose_winner(std::span<const PlanTiming> timings,
                                         const Plan& fallback) {
  std::vector<Timing> sums;
  std::optional<std::size_t> fastest;
  for (const PlanTiming& timing : timings) {
    const std::size_t i = sums.size();
    sums.push_back(summarize(timing.samples));
    const bool ran = timing.status == Status::ok && sums[i].median > 0;
    if (ran && (!fastest || sums[i].median < sums[*fastest].median)) fastest = i;
  }
  if (!fastest) return {};
  std::size_t chosen = *fastest;
  for (std::size_t i = 0; i < timings.size(); ++i) {
    if (timings[i].status != Status::ok || sums[i].median <= 0) continue;
    if (i != *fastest && !tied_in_turn(timings[i].samples, timings[*fastest].samples)) continue;
    if (timings[i].plan == fallback) return i;
    if (canonical_text(timings[i].plan) < canonical_text(timings[chosen].plan)) chosen = i;
  }
  return chosen;
}

}  // namespace wyvern
