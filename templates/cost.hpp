// What one launch takes, the only measure by which default plans are chosen: the least sum wins.
#pragma once

#include <cstdint>

#include "templates/template.hpp"

namespace wyvern {

/// What launches of `t` with this spec take for so much work, in microseconds on a device with
/// these limits: what its contract says, else what follows from its stages: a launch, the bytes of
/// its arguments, and the products of its stages, one chunk after the other where they walk. Rates
/// are of one H200 and one core of a Zen 4, others in proportion. Of no work, a launch alone.
/// Thread-safe.
double cost_of(const Template& t, const Spec& spec, const Workload& work, const Limits& limits);

namespace cost {

/// Of any kernel, however small.
inline constexpr double kLaunch = 3.5;

/// What a block of a walk takes before its first chunk, and for each.
struct Pace {
  double start, chunk;
};

/// Of scans side by side through `chunks` chunks in all, the longest through `longest`, by
/// blocks that have a multiprocessor to themselves: with more of them than multiprocessors they
/// take turns. `even`: how long the mean is, of the longest; short walks fill what long ones leave.
double walks(Pace pace, double longest, double chunks, const Limits& limits, double even = 1);

/// Of all chunks and value heads, by blocks that each take `item` for one and wait for none.
double chunks(double item, const Spec& spec, const Workload& work, const Limits& limits);

/// Chunks of the longest sequence, or of a segment of it where sequences are split.
std::int64_t longest_walk(const Workload& work);

}  // namespace cost
}  // namespace wyvern
