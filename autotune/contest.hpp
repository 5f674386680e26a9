// The last rounds of a tuning: from a search's results to the winning plan.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "autotune/choose.hpp"
#include "autotune/laboratory.hpp"
#include "autotune/results.hpp"
#include "autotune/space.hpp"

namespace wyvern {

/// Candidates are measured one after the other, minutes apart, while a device's clocks drift: that
/// cannot decide between configs a few percent apart. So the near-ties of each group run once more
/// in turn, with samples close in time; then whole operators do, with each config that is still
/// tied as replacement in the best plan.
class Contest {
 public:
  /// All outlive it. `incumbent`: the plan in use, empty where there is none.
  Contest(const SearchSpace& space, Laboratory& laboratory, Results& results, Plan incumbent);

  /// One more pass, in turn, over the ok configs within six percent of their group's best, or
  /// within the drift of the device's clock, in every group of a plan that may win. False when
  /// interrupted.
  bool race(double seconds);

  /// Times whole operators in two rounds: first the default plan, the best plans by sums and the
  /// best one with each near-tie in its place; then the best of these, the plan with the best
  /// config of each step, the incumbent and the default. Returns the winner's index in the second
  /// round; nothing when no plan ran. Calls `begin` with the number of plans of each round.
  std::optional<std::size_t> decide(double seconds, const std::function<void(std::size_t)>& begin);

  /// Of the last round.
  const std::vector<PlanTiming>& timings() const { return timings_; }
  /// A plan, if any, that could not be measured because the machine lacked resources: it is
  /// unjudged.
  const PlanTiming* unjudged() const;

 private:
  struct Entry {
    Plan plan;
    Footprint footprint;
    std::optional<std::size_t> step;  ///< of the best plan: where it differs from that one
  };
  bool matters(std::size_t group, double best_us, double through_us) const;
  std::vector<std::size_t> near_ties(std::size_t group, double share, std::size_t most) const;
  void add(Plan plan, Footprint footprint, std::optional<std::size_t> step = {});
  void add(const RankedPlan& plan);
  void enter_ranked();
  void enter_swaps();
  std::vector<Entry> second_round() const;
  bool run(double seconds, const std::function<void(std::size_t)>& begin);

  const SearchSpace& space_;
  Laboratory& laboratory_;
  Results& results_;
  Plan incumbent_;
  Plan best_;  ///< by sums
  std::vector<Entry> entries_;
  std::vector<PlanTiming> timings_;
  std::optional<PlanTiming> unjudged_;
};

}  // namespace wyvern
