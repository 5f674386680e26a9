// Shared by the contracts of the templates over device/cuda/backward.cuh: bwd_dqkwg, wy_bwd,
// wy_dqkg.
#pragma once

#include <algorithm>

#include "templates/cuda_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::backward {

/// How a block divides a chunk's columns.
struct Division {
  std::int64_t BK, num_warps;
};

inline Division usual(const Spec& s) { return {32, std::max<std::int64_t>(s.BT / 16, 2)}; }

/// Tunables, legality and launch of the portable templates; `shared_bytes` counts the template's
/// own shared memory, `fastest` says which division 16-bit inputs have where it fits.
inline Template portable(Template t, std::int64_t (*shared_bytes)(const Spec&),
                         Division (*fastest)(const Spec&) = usual) {
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16})},
                {tunable::BK, cuda::integers({32, 64, 16})},
                {tunable::num_warps, cuda::integers({4, 8, 2, 1})},
                {tunable::num_stages, cuda::integers({1, 2})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = [shared_bytes](const Spec& s, const Limits& limits) {
    const std::int64_t K = s.K;
    const std::int64_t BT = s.BT;
    const std::int64_t BK = s.BK;
    const std::int64_t warps = s.num_warps;
    const std::int64_t stages = s.num_stages;
    if (std::string reason = cuda::exceeds_dimension("BK", BK, "K", K); !reason.empty())
      return reason;
    if (stages > cuda::ceil_div(K, BK))
      return fmt::format("num_stages={} is more than the {} tiles of K", stages,
                         cuda::ceil_div(K, BK));
    const std::int64_t across = warps / (BT / 16);
    if (across == 0) return fmt::format("num_warps={} is less than BT/16={}", warps, BT / 16);
    if (BK % (across * 16) != 0)
      return fmt::format("num_warps={} leaves warps without columns", warps);
    return cuda::exceeds_shared(shared_bytes(s), limits);
  };
  t.redundant = cuda::repeats_precision;
  t.fallback = [shared_bytes, fastest](Spec& s, const Limits& limits) {
    s.num_stages = 1;
    s.precision = cuda::default_precision(s);
    const bool wide = cuda::is_half(s) && s.K > 32;
    for (const Division division :
         {wide ? fastest(s) : usual(s), usual(s), Division{16, s.BT / 16}}) {
      s.BK = division.BK;
      s.num_warps = division.num_warps;
      if (shared_bytes(s) <= limits.shared_bytes) return;
    }
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

}  // namespace wyvern::backward
