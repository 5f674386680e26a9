#include "autotune/floor.hpp"

#include <algorithm>
#include <ranges>

namespace wyvern {
namespace {

/// How much slower than bf16 the products of the problem's dtype and floor are on tensor cores; 0:
/// they do not run there.
double dtype_factor(const Problem& problem) {
  if (problem.dtype != DType::fp32) return 1;
  switch (precision_floor(problem)) {
    case Precision::tf32: return 2;
    case Precision::tf32x3: return 6;  // three passes
    case Precision::ieee: return 0;
  }
  return 1;
}

/// The bandwidth of a pass whose tensors are in the caches as far as they fit: the measured update
/// rate of the largest data that is not larger than they are.
double warm_rate(const Rates& rates, const Problem& problem) {
  // work_of() counts tensors that are updated in place twice.
  const double least_bytes = work_of(problem).bytes / 2;
  double rate = rates.bytes_per_s;
  for (const auto& [bytes, bytes_per_s] : rates.cached | std::views::reverse) {
    rate = std::max(rate, bytes_per_s);
    if (bytes <= least_bytes) break;
  }
  return rate;
}

}  // namespace

Peak device_peak(const Device& device, const Problem& problem, bool cold) {
  return peak_of(device.impl().rates(), problem, cold);
}

Peak peak_of(const Rates& rates, const Problem& problem, bool cold) {
  const double factor = dtype_factor(problem);
  const bool scalar = factor == 0 || rates.matrix_flops_per_s == 0;
  return {cold ? rates.bytes_per_s : warm_rate(rates, problem),
          scalar ? rates.scalar_flops_per_s : rates.matrix_flops_per_s / factor, rates.basis};
}

double floor_time(const Work& work, const Peak& peak) {
  const double memory = peak.bytes_per_s > 0 ? work.bytes / peak.bytes_per_s : 0;
  const double compute = peak.flops_per_s > 0 ? work.flops / peak.flops_per_s : 0;
  return std::max(memory, compute);
}

}  // namespace wyvern
