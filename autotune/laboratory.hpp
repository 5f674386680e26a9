// The source of measurements: the tuning loop requests them from a laboratory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "autotune/choose.hpp"
#include "autotune/results.hpp"
#include "autotune/space.hpp"

namespace wyvern {

/// Called from one thread.
class Laboratory {
 public:
  virtual ~Laboratory() = default;
  /// The candidate's outcome in an earlier tuning, if any.
  virtual std::optional<Outcome> recall(const Candidate& candidate) = 0;
  /// Says that these will be measured soon, in this order, so that they can be compiled.
  virtual void announce(std::span<const Candidate> candidates) = 0;
  /// The resources of the candidate's kernel, where it is compiled already.
  virtual std::optional<Resources> resources(const Candidate&) { return {}; }
  /// Compiles, checks and times; remembers the outcome unless it is unjudged. Never throws for a
  /// candidate's failure. `bar` is the best median of its group so far, 0 if none. Nothing when
  /// `interrupted` became true meanwhile.
  virtual std::optional<Outcome> measure(const Candidate& candidate, double bar) = 0;
  /// Samples and clocks of candidates of one group that are known to be correct, measured in turn
  /// for about `seconds`: samples of equal index are close in time. A candidate that fails now has
  /// none. Nothing when interrupted.
  virtual std::optional<std::vector<Series>> race(std::span<const Candidate> candidates,
                                                  double seconds) = 0;
  /// Stores a candidate's outcome, as measure() does.
  virtual void remember(const Candidate& candidate, const Outcome& outcome) = 0;
  /// Times whole operators by these plans in turn, for about `seconds`.
  virtual std::vector<PlanTiming> compare(std::span<const Plan> plans, double seconds) = 0;
  /// By how much the device's speed has changed while candidates were measured: 0.05 if the same
  /// work took 5% longer or shorter, 0 if unknown.
  virtual double pace_change() const { return 0; }
  /// Kernels compiled so far.
  virtual std::int64_t compiled() const = 0;
};

}  // namespace wyvern
