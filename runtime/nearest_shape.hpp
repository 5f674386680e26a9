// Which tuned shape's plan serves a shape that was not tuned: the same model in other batches, at
// other lengths, or with its heads split over several devices.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>

#include <optional>
#include <vector>

#include "cache/cache.hpp"

namespace wyvern {

/// The distance between two problems that differ in heads, batch and length alone; nothing for
/// others, whose kernels are not the same. A plan's merit depends on how many chains of chunks
/// there are (sequences times value heads) and how long they are: each doubling of either counts 1,
/// of value heads a key head 0.5. Half of a model's heads at twice the batch has distance 0.
std::optional<double> shape_distance(const ProblemKey& a, const ProblemKey& b);

/// Whether a plan that took `ratio` of the default plan's time where it was tuned may be expected
/// to beat it at this distance too: its gain must be more than two percent, and two more for each
/// doubling, of which there may be three.
bool carries_over(double ratio, double distance);

/// Of winners of this device the nearest that carries over to the problem; of several that one
/// which gained most.
std::optional<WinnerRow> nearest_shape(const std::vector<WinnerRow>& winners,
                                       const DeviceInfo& device, const ProblemKey& key);

}  // namespace wyvern
