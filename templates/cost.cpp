#include "templates/cost.hpp"

#include <algorithm>
#include <cmath>

namespace wyvern {
namespace {

constexpr double real(std::int64_t x) { return static_cast<double>(x); }
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Multiprocessors; 1 on a CPU and where no device is present.
double units(const Limits& limits) { return std::max(limits.multiprocessors, 1); }

/// Microseconds until a kernel's first blocks have loaded their tiles.
constexpr double kFilled = 1.5;

/// Of one multiprocessor or core.
struct Rates {
  double flops;  ///< a microsecond, with many blocks on it
  double alone;  ///< the same, of one block that waits for its own results
  double bytes;  ///< a microsecond
  double chunk;  ///< microseconds that each chunk of a scan waits
};

/// Measured with portable kernels and CPU templates in recorded spaces (autotune/recordings).
Rates rates(const Template& t, const Spec& spec, std::int64_t BT, const Limits& limits) {
  if (t.device == DeviceKind::cpu) {
    // Tiles of few rows leave vector units idle.
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

/// The cost from the products of the template's stages and the bytes of its arguments.
double derived(const Template& t, const Spec& spec, const Workload& work, const Limits& limits) {
  const bool split = t.tunable("SEG") != nullptr;
  Spec sizes = spec;
  sizes.BT = work.shape.BT;
  double flops = 0;  // of a chunk, or of a segment
  Scan scan = Scan::none;
  for (const Cover& cover : t.covers) {
    if (cover.done) continue;
    const StageDefinition& stage = *cover.stage;
    if (!split && (stage.scan == Scan::segment || stage.scan == Scan::segments)) continue;
    scan = std::max(scan, stage.scan);
    for (const Product& product : stage.products)
      flops += 2 * product.times * real(product.rows.value(sizes, work.extents)) *
               real(product.cols.value(sizes, work.extents)) *
               real(product.inner.value(sizes, work.extents));
  }
  const Extents& e = work.extents;
  const Rates rate = rates(t, spec, work.shape.BT, limits);
  const double items = real((scan == Scan::segments ? e.NS : e.NT) * spec.HV);
  double parallel = items * flops / (rate.flops * units(limits));
  const double moved = argument_bytes(t, spec, work) / (rate.bytes * units(limits));
  double serial = 0;
  if (scan != Scan::none) {
    const Geometry geometry = t.geometry(spec, e, limits);
    const double blocks = real(geometry.grid[0] * geometry.grid[1] * geometry.grid[2]);
    const double scans = real((split && scan != Scan::segments ? e.NS : e.N) * spec.HV);
    // Some multiprocessors have one more of the segments' blocks, and all of these last as long as
    // a whole segment: a sequence's last one may be shorter.
    const double each = blocks / units(limits);
    if (split && scan != Scan::segments && each > 1) {
      const std::int64_t chunks = ceil_div(work.longest, work.shape.BT);
      const std::int64_t whole = ceil_div(chunks, work.shape.SEG) * work.shape.SEG;
      parallel *= std::ceil(each) / each * real(whole) / real(chunks);
    }
    const double steps = scan == Scan::segments
                             ? real(ceil_div(work.longest, work.shape.BT * work.shape.SEG))
                             : real(cost::longest_scan(work));
    // A step from segment to segment waits for memory.
    const double waits = scan == Scan::segments ? 4 * rate.chunk : rate.chunk;
    serial = steps * (waits + flops / (rate.alone * std::max(1.0, blocks / scans)));
  }
  return cost::kLaunch + kFilled + moved + std::max(parallel, serial);
}

}  // namespace

double cost_of(const Template& t, const Spec& spec, const Workload& work, const Limits& limits) {
  if (t.cost) return t.cost(spec, work, limits);
  return work.longest == 0 ? cost::kLaunch : derived(t, spec, work, limits);
}

double cost::scans(Pace pace, double longest, double chunks, const Limits& limits, double even) {
  if (longest == 0) return kLaunch;
  const double full = chunks / (longest * units(limits));
  const double waves = full + even * (std::ceil(full) - full);
  return kLaunch + (pace.start + pace.chunk * longest) * std::max(1.0, waves);
}

double cost::chunks(double item, const Spec& spec, const Workload& work, const Limits& limits) {
  return kLaunch + item * real(work.extents.NT * spec.HV) / units(limits);
}

std::int64_t cost::longest_scan(const Workload& work) {
  if (work.longest == 0) return 0;
  const std::int64_t all = ceil_div(work.longest, work.shape.BT);
  return work.shape.SEG == 0 ? all : std::min(all, work.shape.SEG);
}

}  // namespace wyvern
