// The cost of one launch. The default plan is the one with the least sum of costs.
#pragma once

#include <cstdint>

#include "templates/template.hpp"

namespace wyvern {

/// Microseconds of a launch of `t` with this spec and workload on a device with these limits: by
/// the template's own cost function, else by its stages: a launch, the bytes of the arguments, and
/// the products of the stages, chunk after chunk where they scan. Rates are those of one H200 and
/// one core of a Zen 4; others are scaled. Without work, a launch alone. Thread-safe.
double cost_of(const Template& t, const Spec& spec, const Workload& work, const Limits& limits);

namespace cost {

/// Microseconds of the smallest launch.
inline constexpr double kLaunch = 3.5;

/// Microseconds of a block of a scan: before its first chunk, and for each chunk.
struct Pace {
  double start, chunk;
};

/// Cost of parallel scans of `chunks` chunks in all, `longest` in the longest, with one block a
/// scan and a multiprocessor. More blocks than multiprocessors run in waves; short scans fill the
/// waves of long ones, by `even`, the mean length over the longest.
double scans(Pace pace, double longest, double chunks, const Limits& limits, double even = 1);

/// Cost of an independent block for each chunk and value head, `item` microseconds each.
double chunks(double item, const Spec& spec, const Workload& work, const Limits& limits);

/// Chunks of the longest scan: of a sequence, or of a segment where sequences are split.
std::int64_t longest_scan(const Workload& work);

}  // namespace cost
}  // namespace wyvern
