#include "autotune/floor.hpp"

#include <algorithm>

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

}  // namespace

Peak device_peak(const Device& device, const Problem& problem) {
  return peak_of(device.impl().rates(), problem);
}

Peak peak_of(const Rates& rates, const Problem& problem) {
  const double factor = dtype_factor(problem);
  const bool scalar = factor == 0 || rates.matrix_flops_per_s == 0;
  return {rates.bytes_per_s, scalar ? rates.scalar_flops_per_s : rates.matrix_flops_per_s / factor,
          rates.basis};
}

double floor_time(const Work& work, const Peak& peak) {
  const double memory = peak.bytes_per_s > 0 ? work.bytes / peak.bytes_per_s : 0;
  const double compute = peak.flops_per_s > 0 ? work.flops / peak.flops_per_s : 0;
  return std::max(memory, compute);
}

}  // namespace wyvern
