// The distance between a tuned problem and an untuned one that may use its plan: the same model
// with other batches, lengths, splits of heads over devices, options, or threads of a processor.
#pragma once

#include <wyvern/problem.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern {

/// A problem on a device, parsed for tuning_distance().
class TunedFor {
 public:
  /// `device`: the device's key.
  TunedFor(std::string_view device, const ProblemKey& key);

  /// Fields that must be equal; other problems have no distance.
  const std::string& kernels() const noexcept { return kernels_; }

 private:
  friend std::optional<double> tuning_distance(const TunedFor& wanted, const TunedFor& found);

  std::string kernels_;  ///< the device's model, and the family's pieces that must be the same
  std::vector<std::string> options_;  ///< values of the fields that have a distance, in their order
  double chains_ = 0, length_ = 0, group_ = 0, threads_ = 0;
};

/// The distance of the problem `wanted` from the tuned problem `found`; nothing if a plan of one
/// may not be used for the other. A plan's speed depends on the number of scans (sequences times
/// value heads) and the length of the longest: each doubling of either counts 1, a doubling of
/// threads 1, of value heads per key head 0.5; options count as ProblemField::distance says. All
/// else in a family must be equal. Half of a model's heads at twice the batch has distance 0.
std::optional<double> tuning_distance(const TunedFor& wanted, const TunedFor& found);
/// The same on one device.
std::optional<double> tuning_distance(const ProblemKey& wanted, const ProblemKey& found);

/// Whether a plan that took `ratio` of the default plan's time where it was tuned is expected to
/// beat the default plan at this distance: its gain must exceed two percent, plus two percent per
/// unit of distance. The distance may be at most 3.
bool carries_over(double ratio, double distance);

}  // namespace wyvern
