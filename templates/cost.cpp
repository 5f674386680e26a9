#include "templates/cost.hpp"

#include <algorithm>
#include <cmath>

namespace wyvern {
namespace {

constexpr double real(std::int64_t x) { return static_cast<double>(x); }
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Multiprocessors, or what stands for them: a CPU's threads share all there is to share.
double units(const Limits& limits) { return std::max(limits.multiprocessors, 1); }

/// Microseconds until a kernel's first blocks have what they work on.
constexpr double kFilled = 1.5;

/// Of one multiprocessor or core.
struct Rates {
  double flops;  ///< a microsecond, where many blocks are on it
  double alone;  ///< the same, of one block that waits for its own results
  double bytes;  ///< a microsecond
  double chunk;  ///< microseconds that a block waits for in each chunk of a walk
};

/// As portable kernels and CPU templates reach them in recorded spaces (autotune/recordings).
Rates rates(const Template& t, const Spec& spec, std::int64_t BT, const Limits& limits) {
  if (t.device == DeviceKind::cpu) {
    // Tiles of few rows keep vector units less busy.
    const double flops = 6e4 * real(BT) / real(BT + 15);
    return {flops, flops, 8e3, 0.3};
  }
  constexpr double kH200 = 4.8e6 / 132;
  const double bytes = limits.bytes_per_us > 0 ? limits.bytes_per_us / units(limits) : kH200;
  const bool half = spec.DTYPE != DType::fp32;
  return {half ? 1.9e6 : 0.3e6, half ? 0.9e6 : 0.15e6, bytes, 0.25};
}

/// Bytes of all arguments: each is read or written once.
double argument_bytes(const Template& t, const Spec& spec, const Workload& work) {
  double bytes = 0;
  for (const Parameter& parameter : t.parameters) {
    if (!parameter.present.holds(spec)) continue;
    auto own = static_cast<double>(size_of(parameter.type.of(spec)));
    for (const Dim& dim : parameter.shape) own *= real(dim.value(spec, work.extents));
    bytes += parameter.access == Access::inout ? 2 * own : own;
  }
  return bytes;
}

/// By what its stages multiply and its arguments weigh.
double derived(const Template& t, const Spec& spec, const Workload& work, const Limits& limits) {
  const bool split = t.tunable("SEG") != nullptr;
  Spec sizes = spec;
  sizes.BT = work.shape.BT;
  double flops = 0;  // of a chunk, or of a segment
  Walk walk = Walk::none;
  for (const Cover& cover : t.covers) {
    const StageDefinition& stage = *cover.stage;
    if (!split && (stage.walk == Walk::segment || stage.walk == Walk::segments)) continue;
    walk = std::max(walk, stage.walk);
    for (const Product& product : stage.products)
      flops += 2 * product.times * real(product.rows.value(sizes, work.extents)) *
               real(product.cols.value(sizes, work.extents)) *
               real(product.inner.value(sizes, work.extents));
  }
  const Extents& e = work.extents;
  const Rates rate = rates(t, spec, work.shape.BT, limits);
  const double parts = real((walk == Walk::segments ? e.NS : e.NT) * spec.HV);
  const double together = parts * flops / (rate.flops * units(limits));
  const double moved = argument_bytes(t, spec, work) / (rate.bytes * units(limits));
  double one_by_one = 0;
  if (walk != Walk::none) {
    const Geometry geometry = t.geometry(spec, e, limits);
    const double blocks = real(geometry.grid[0] * geometry.grid[1] * geometry.grid[2]);
    const double chains = real((split && walk != Walk::segments ? e.NS : e.N) * spec.HV);
    const double steps = walk == Walk::segments
                             ? real(ceil_div(work.longest, work.shape.BT * work.shape.SEG))
                             : real(cost::longest_walk(work));
    // States past segments come from memory, one after the other.
    const double waits = walk == Walk::segments ? 4 * rate.chunk : rate.chunk;
    one_by_one = steps * (waits + flops / (rate.alone * std::max(1.0, blocks / chains)));
  }
  return cost::kLaunch + kFilled + moved + std::max(together, one_by_one);
}

}  // namespace

double cost_of(const Template& t, const Spec& spec, const Workload& work, const Limits& limits) {
  if (t.cost) return t.cost(spec, work, limits);
  return work.longest == 0 ? cost::kLaunch : derived(t, spec, work, limits);
}

double cost::walks(Pace pace, double longest, double chunks, const Limits& limits, double even) {
  if (longest == 0) return kLaunch;
  const double full = chunks / (longest * units(limits));
  const double turns = full + even * (std::ceil(full) - full);
  return kLaunch + (pace.start + pace.chunk * longest) * std::max(1.0, turns);
}

double cost::chunks(double item, const Spec& spec, const Workload& work, const Limits& limits) {
  return kLaunch + item * real(work.extents.NT * spec.HV) / units(limits);
}

std::int64_t cost::longest_walk(const Workload& work) {
  if (work.longest == 0) return 0;
  const std::int64_t all = ceil_div(work.longest, work.shape.BT);
  return work.shape.SEG == 0 ? all : std::min(all, work.shape.SEG);
}

}  // namespace wyvern
