// From figures to a plan: the best config of a group, the best plans by sums, the winner of a
// comparison. Ties within noise go the same way each time: the default first, then the least
// canonical text.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "autotune/results.hpp"
#include "autotune/space.hpp"

namespace wyvern {

/// The group's config to use: of those tied with the fastest, the default, else the first by text.
/// Nothing when no config is ok.
std::optional<std::size_t> best_config(const SearchSpace& space, const Results& results,
                                       std::size_t group);

struct RankedPlan {
  Plan plan;
  std::vector<std::size_t> groups;  ///< of its steps
  double sum_us = 0;                ///< of its steps' medians
};

/// Up to `count` plans of the layer, each edge with its best config, by sum of medians; fewer when
/// groups have no ok config. Shortest paths by dynamic programming over stage uses.
std::vector<RankedPlan> best_plans(const SearchSpace& space, const Layer& layer,
                                   const Results& results, std::size_t count);

/// The same over all layers.
std::vector<RankedPlan> best_plans(const SearchSpace& space, const Results& results,
                                   std::size_t count);

/// For each group, the least sum of a plan that uses it, by best medians; a group without an ok
/// config counts as free, so that its figure is a bound. Infinite where no such plan is known to
/// work.
std::vector<double> costs_through(const SearchSpace& space, const Results& results);

/// A plan run as a whole operator, in turn with others: equal indices of samples are neighbours.
struct PlanTiming {
  Plan plan;
  Status status = Status::failed;
  std::string detail;
  std::vector<double> samples;  ///< us
};

/// Index of the winner, or nothing when none is ok. `fallback` is the default plan.
std::optional<std::size_t> choose_winner(std::span<const PlanTiming> timings, const Plan& fallback);

}  // namespace wyvern
