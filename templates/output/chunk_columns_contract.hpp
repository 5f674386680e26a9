// Shared by CUDA templates whose blocks have BV value columns of one chunk and value head, and
// whose warps have 16-row strips of it, with the chunk's BT by BT scores in registers beside the
// columns: fwd_o, kda_fwd_o, bwd_dv_local.
#pragma once

#include <algorithm>

#include "templates/cuda_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::chunk_columns {

/// Empty, or why warps cannot divide a BT by BV tile, or K does not fill the pipeline's buffers.
inline std::string problem(const Spec& s) {
  for (std::string reason : {cuda::exceeds_dimension("BK", s.BK, "K", s.K),
                             cuda::exceeds_dimension("BV", s.BV, "V", s.V)})
    if (!reason.empty()) return reason;
  const std::int64_t tiles = cuda::ceil_div(s.K, s.BK);
  if (s.num_stages > tiles)
    return fmt::format("num_stages={} is more than the {} tiles of K", s.num_stages, tiles);
  const std::int64_t strips = std::max<std::int64_t>(s.BT / 16 / s.num_warps, 1);
  const std::int64_t across = s.num_warps * strips * 16 / s.BT;
  if (s.BV % (across * 16) != 0)
    return fmt::format("num_warps={} leaves warps without columns", s.num_warps);
  if (strips > 2 || across > 4 || strips * (s.BV / across + s.BT) / 2 > cuda::kMaxAccumulators)
    return fmt::format("num_warps={} does not suit a {} by {} tile", s.num_warps, s.BT, s.BV);
  return {};
}

/// CUDA, sm_80 and up, for chunks of these sizes.
inline Template portable(Template t, std::initializer_list<std::int64_t> chunk_sizes,
                         std::int64_t (*shared_bytes)(const Spec&)) {
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers(chunk_sizes)},
                {tunable::BK, cuda::integers({64, 128, 32})},
                {tunable::BV, cuda::integers({128, 64, 32})},
                {tunable::num_warps, cuda::integers({4, 8, 2})},
                {tunable::num_stages, cuda::integers({2, 1})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = [shared_bytes](const Spec& s, const Limits& limits) {
    const std::string reason = problem(s);
    return reason.empty() ? cuda::exceeds_shared(shared_bytes(s), limits) : reason;
  };
  t.redundant = cuda::repeats_precision;
  // A chunk size that is not among these has too few warps here, so no default.
  const std::int64_t largest = std::max(chunk_sizes);
  t.fallback = [largest](Spec& s, const Limits&) {
    s.BK = s.K > 32 ? 64 : 32;
    s.BV = s.V > 64 && cuda::is_half(s) ? 128 : s.V > 32 ? 64 : 32;
    s.num_warps = s.BT == 64 ? 4 : s.BT == 128 && largest == 128 ? 8 : 2;
    s.num_stages = s.K > 64 && cuda::is_half(s) ? 2 : 1;
    s.precision = cuda::default_precision(s);
  };
  t.geometry = [shared_bytes](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t tiles = cuda::ceil_div(s.V, s.BV);
    return cuda::launch(e.NT * s.HV * tiles, s, shared_bytes(s));
  };
  return t;
}

}  // namespace wyvern::chunk_columns
