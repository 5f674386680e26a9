// Shared by CUDA templates inside a chunk, with beta or with erase and write gates: the products of
// keys with a gate per key channel (kda_intra), W and U from the inverse (recompute_w_u,
// kda_recompute_w_u), and both at once. `bytes` counts the template's own shared memory.
#pragma once

#include <algorithm>

#include "templates/cuda_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::intra {

/// Empty, or why warps cannot divide the strips of a chunk's products.
inline std::string uneven_strips(const Spec& s) {
  if (s.num_warps >= s.BT / 16 && s.num_warps <= s.BT / 4) return {};
  return fmt::format("num_warps={} is not between BT/16={} and BT/4={}", s.num_warps, s.BT / 16,
                     s.BT / 4);
}

/// CUDA, sm_80 and up: one block a chunk and value head, tiles of BK columns of K.
inline Template products(Template t, std::int64_t (*bytes)(const Spec&)) {
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16})},
                {tunable::BK, cuda::integers({64, 128, 32})},
                {tunable::num_warps, cuda::integers({4, 8, 2, 1})},
                {tunable::num_stages, cuda::integers({2, 1})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = [bytes](const Spec& s, const Limits& limits) {
    if (std::string reason = cuda::exceeds_dimension("BK", s.BK, "K", s.K); !reason.empty())
      return reason;
    const std::int64_t tiles = cuda::ceil_div(s.K, s.BK);
    if (s.num_stages > tiles)
      return fmt::format("num_stages={} is more than the {} tiles of K", s.num_stages, tiles);
    const std::string reason = uneven_strips(s);
    return reason.empty() ? cuda::exceeds_shared(bytes(s), limits) : reason;
  };
  t.fallback = [](Spec& s, const Limits&) {
    const bool half = cuda::is_half(s);
    s.BK = s.K > 32 ? 64 : 32;
    s.num_warps = std::max<std::int64_t>(s.BT / 16, 2);
    s.num_stages = s.K > 64 && half ? 2 : 1;
    s.precision = half ? Precision::tf32 : Precision::tf32x3;
  };
  t.geometry = cuda::chunk_blocks(bytes);
  return t;
}

/// CUDA, sm_80 and up: one block a tile of columns of W (for kda of qg and kg too), or of U.
inline Template from_inverse(Template t, std::int64_t (*bytes)(const Spec&)) {
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16})},
                {tunable::BK, cuda::integers({64, 128, 32})},
                {tunable::BV, cuda::integers({64, 128, 32})},
                {tunable::num_warps, cuda::integers({4, 2, 8})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = [bytes](const Spec& s, const Limits& limits) {
    for (std::string reason : {cuda::exceeds_dimension("BK", s.BK, "K", s.K),
                               cuda::exceeds_dimension("BV", s.BV, "V", s.V)})
      if (!reason.empty()) return reason;
    if (s.num_warps * 16 > std::max(s.BK, s.BV))
      return fmt::format("num_warps={} leaves warps without columns", s.num_warps);
    return cuda::exceeds_shared(bytes(s), limits);
  };
  t.redundant = cuda::repeats_precision;
  t.fallback = [](Spec& s, const Limits&) {
    s.BK = s.K > 32 ? 64 : 32;
    s.BV = s.V > 32 ? 64 : 32;
    s.num_warps = 2;
    s.precision = cuda::default_precision(s);
  };
  t.geometry = [bytes](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t tiles = cuda::ceil_div(s.K, s.BK) + cuda::ceil_div(s.V, s.BV);
    return cuda::launch(e.NT * s.HV * tiles, s, bytes(s));
  };
  return t;
}

/// CUDA, sm_80 and up: both, one block a chunk and value head.
inline Template fused(Template t, std::int64_t (*bytes)(const Spec&)) {
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16})},
                {tunable::BV, cuda::integers({128, 64, 32})},
                {tunable::num_warps, cuda::integers({8, 4, 2})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = [bytes](const Spec& s, const Limits& limits) {
    for (std::string reason : {cuda::exceeds_dimension("BV", s.BV, "V", s.V), uneven_strips(s)})
      if (!reason.empty()) return reason;
    if (s.num_warps * 8 > s.BV)
      return fmt::format("num_warps={} leaves warps without columns", s.num_warps);
    return cuda::exceeds_shared(bytes(s), limits);
  };
  t.fallback = [](Spec& s, const Limits&) {
    const bool half = cuda::is_half(s);
    s.BV = s.V > 64 && half ? 128 : s.V > 32 ? 64 : 32;
    s.num_warps = s.BT == 64 && s.V > 32 ? 8 : s.BT == 64 || half ? 4 : 2;
    s.precision = half ? Precision::tf32 : Precision::tf32x3;
  };
  t.geometry = cuda::chunk_blocks(bytes);
  return t;
}

}  // namespace wyvern::intra
