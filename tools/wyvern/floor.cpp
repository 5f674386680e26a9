#include "tools/wyvern/floor.hpp"

#include <wyvern/runtime.hpp>

#include <algorithm>
#include <cmath>

#include "runtime/devices/device_impl.hpp"

namespace wyvern::cli {
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

double real(std::int64_t count) { return static_cast<double>(count); }

double tokens_of(const Problem& p) { return real(p.B) * real(p.T); }

/// Every tensor once, what is read and written twice; of a pool of states only what the sequences
/// use.
double bytes_of(const Problem& p) {
  double bytes = 0;
  for (const TensorSpec& spec : tensor_specs(p)) {
    if (!spec.present) continue;
    double elements = 1;
    for (int i = 0; i < spec.rank; ++i) elements *= real(spec.shape[static_cast<std::size_t>(i)]);
    const bool pool = p.state_index && (spec.name == "initial_state" || spec.name == "state");
    if (pool && p.state_slots > p.N) elements *= real(p.N) / real(p.state_slots);
    const double times = spec.access == TensorAccess::inout ? 2 : 1;
    bytes += times * elements * real(static_cast<std::int64_t>(size_of(spec.dtype)));
  }
  if (p.pass == Pass::backward && !p.disable_recompute) {
    const double chunks = std::max(tokens_of(p) / real(kept_chunk_size(p)), real(p.N));
    if (tokens_of(p) > 0)
      bytes += 2 * chunks * real(p.HV * p.K) * real(p.V) *
               real(static_cast<std::int64_t>(size_of(p.dtype)));
  }
  return bytes;
}

/// FLOPs of a token and value head as multiples of K V, C V, C K (of which some are shared by the
/// value heads of a group where the gate is no vector) and C^2.
struct Products {
  double KV, CV, CK, shared_CK, CC;
};

Products products_of(const Problem& p) {
  if (p.pass == Pass::recurrent) return {6, 0, 0, 0, 0};
  if (p.pass == Pass::forward) return {6, 4, 0, 4, 2};
  return p.disable_recompute ? Products{12, 8, 10, 4, 0} : Products{16, 10, 12, 4, 2};
}

double flops_of(const Problem& p) {
  const Products n = products_of(p);
  const double K = real(p.K), V = real(p.V);
  const double longest = p.N > 0 ? std::ceil(tokens_of(p) / real(p.N)) : 0;
  const double C = std::min(real(kept_chunk_size(p)), longest);
  const double shared =
      gate_kind(p) == GateKind::vector ? n.shared_CK : n.shared_CK * real(p.H) / real(p.HV);
  return tokens_of(p) * real(p.HV) *
         (n.KV * K * V + n.CV * C * V + (n.CK + shared) * C * K + n.CC * C * C);
}

}  // namespace

Work work_of(const Problem& problem) { return {bytes_of(problem), flops_of(problem)}; }

Peak device_peak(const Device& device, const Problem& problem) {
  const Rates rates = device.impl().rates();
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

}  // namespace wyvern::cli
