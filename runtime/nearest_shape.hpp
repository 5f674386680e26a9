// How far a tuned problem is from one that was not tuned, whose plan it may serve: the same model
// in other batches, at other lengths, with its heads split over several devices, with other
// options, or on a processor with other threads.
#pragma once

#include <wyvern/problem.hpp>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace wyvern {

/// An option that a plan may cross: one piece of ProblemKey::family.
struct CrossedOption {
  std::string_view name;  ///< of the piece: "initial_state"
  double distance = 0;    ///< what a difference in it adds
  /// The field narrows the plans that a problem may have: a plan that was tuned without it may
  /// serve a problem with it. A plan that was tuned with it serves only problems of the same value.
  bool narrows = false;
};

/// The options that a plan may cross, the nearest first: states (given, wanted, their layout), then
/// what is done to inputs before the recurrence (norms, the gate and beta in the kernel), then
/// dtypes of beta and g, then packed sequences, then what narrows the plans. All else in a family
/// is never crossed: operator, pass, dtype, K, V, steps of a token, precision floor, whether there
/// is a gate and whether it is bounded.
std::span<const CrossedOption> crossed_options();

/// A problem of a device, as distances see it.
class TunedFor {
 public:
  /// `device`: its key.
  TunedFor(std::string_view device, const ProblemKey& key);

  /// Problems that differ in this have no distance.
  const std::string& kernels() const noexcept { return kernels_; }

 private:
  friend std::optional<double> tuning_distance(const TunedFor& wanted, const TunedFor& found);

  static constexpr std::size_t kOptions = 27;

  std::string kernels_;  ///< the device's model, and the pieces of the family that are not crossed
  std::array<std::string, kOptions> options_;  ///< by crossed_options()
  double chains_ = 0, length_ = 0, group_ = 0, threads_ = 0;
};

/// How far the problem that is asked for is from one that was tuned; nothing where the plan of one
/// may not serve the other. A plan's merit depends on how many chains of chunks there are
/// (sequences times value heads) and how long the longest are: each doubling of either counts 1,
/// and so does one of threads; of value heads a key head 0.5; options count as crossed_options()
/// says. Half of a model's heads at twice the batch has distance 0.
std::optional<double> tuning_distance(const TunedFor& wanted, const TunedFor& found);
/// The same on one device.
std::optional<double> tuning_distance(const ProblemKey& wanted, const ProblemKey& found);

/// Whether a plan that took `ratio` of the default plan's time where it was tuned may be expected
/// to beat it at this distance too: its gain must be more than two percent, and two more for each
/// 1 of distance, which may be 3.
bool carries_over(double ratio, double distance);

}  // namespace wyvern
