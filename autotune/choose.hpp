// From figures to a plan: the best config of a group, the best plans by sums, the winner of a
// comparison. Ties within noise are broken the same way each time: the default or the plan in use
// first, then the one with the smaller footprint, then the first in the space.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "autotune/results.hpp"
#include "autotune/space.hpp"

namespace wyvern {

/// Device resources of a kernel, or of a plan's kernels; the smaller footprint wins a tie.
struct Footprint {
  std::int64_t spill_bytes = 0;
  std::int64_t block_bytes = 0;  ///< registers and shared memory of a block; scratch on a CPU
  std::int64_t code_bytes = 0;
  auto operator<=>(const Footprint&) const = default;
  Footprint& operator+=(const Footprint& other);
};
/// From the known resources of the candidate; unknown ones count as 0.
Footprint footprint(const SearchSpace& space, const Results& results, const Candidate& candidate);

/// The group's config of the least median; nothing when none is ok.
std::optional<std::size_t> fastest_config(const Results& results, std::size_t group);

/// The group's config to use: among those tied with the fastest, the default, else the one with the
/// smallest footprint, else the first. Nothing when no config is ok.
std::optional<std::size_t> best_config(const SearchSpace& space, const Results& results,
                                       std::size_t group);

struct RankedPlan {
  Plan plan;
  std::vector<Candidate> candidates;  ///< its steps
  double sum_us = 0;                  ///< of its steps' medians
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
  Footprint footprint = {};
  std::vector<double> clocks_mhz = {};  ///< of the device at each sample, where it tells
};

/// Index of the winner, or nothing when none is ok: the fastest of those that beat `fallback`, the
/// default plan, beyond noise, else the default where it ran. Among plans tied with the fastest:
/// `incumbent`, the plan in use (empty: none), else the one with the smallest footprint, else the
/// first.
std::optional<std::size_t> choose_winner(std::span<const PlanTiming> timings, const Plan& fallback,
                                         const Plan& incumbent = {});

}  // namespace wyvern
