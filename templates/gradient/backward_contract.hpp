// Shared by the contracts of the templates over device/cuda/backward.cuh: bwd_dqkwg, wy_bwd,
// wy_dqkg.
#pragma once

#include <algorithm>

#include "templates/cuda_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::backward {

/// Tunables, legality and launch of the portable templates; `shared_bytes` counts the template's
/// own shared memory.
inline Template portable(Template t, std::int64_t (*shared_bytes)(const Spec&)) {
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
  t.fallback = [shared_bytes](Spec& s, const Limits& limits) {
    s.BK = 32;
    s.num_warps = std::max<std::int64_t>(s.BT / 16, 2);
    s.num_stages = 1;
    s.precision = cuda::default_precision(s);
    if (shared_bytes(s) > limits.shared_bytes) {
      s.BK = 16;
      s.num_warps = s.BT / 16;
    }
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

}  // namespace wyvern::backward
