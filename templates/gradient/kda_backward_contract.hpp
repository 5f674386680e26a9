// Shared by the contracts of kda_bwd_dqkg, kda_intra_bwd and kda_wy_dqkg, the CUDA templates of a
// chunk's whole gradients.
#pragma once

#include "templates/cuda_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_backward {

/// Empty, or why warps cannot divide the strips and columns of K tiles.
inline std::string uneven_warps(const Spec& s) {
  const std::int64_t BK = s.BK, BT = s.BT;
  const std::int64_t warps = s.num_warps;
  if (warps % (BT / 16) != 0)
    return fmt::format("num_warps={} does not divide the {} strips of BT={}", warps, BT / 16, BT);
  if (BK % (warps * 256 / BT) != 0)
    return fmt::format("num_warps={} leaves warps without 16 columns of BK={}", warps, BK);
  return {};
}

/// Empty, or why the tiles of K or the warps do not suit the problem.
inline std::string unsuitable(const Spec& s) {
  const std::int64_t K = s.K, BK = s.BK;
  const std::int64_t stages = s.num_stages;
  if (std::string reason = cuda::exceeds_dimension("BK", BK, "K", K); !reason.empty())
    return reason;
  if (stages > cuda::ceil_div(K, BK))
    return fmt::format("num_stages={} is more than the {} tiles of K", stages,
                       cuda::ceil_div(K, BK));
  return uneven_warps(s);
}

/// CUDA, sm_80 and up: one block a chunk and value head, tiles of BK columns of K. `bytes` counts
/// the template's own shared memory.
inline Template portable(Template t, std::int64_t (*bytes)(const Spec&)) {
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16})},
                {tunable::BK, cuda::integers({32, 64, 16})},
                {tunable::num_warps, cuda::integers({4, 8, 2, 1})},
                {tunable::num_stages, cuda::integers({1, 2})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = [bytes](const Spec& s, const Limits& limits) {
    const std::string reason = unsuitable(s);
    return reason.empty() ? cuda::exceeds_shared(bytes(s), limits) : reason;
  };
  t.redundant = cuda::repeats_precision;
  t.fallback = [](Spec& s, const Limits&) {
    s.BK = 32;
    s.num_warps = s.BT / 8;
    s.num_stages = 1;
    s.precision = cuda::default_precision(s);
  };
  t.geometry = cuda::chunk_blocks(bytes);
  return t;
}

}  // namespace wyvern::kda_backward
