#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/gradient/kda_bwd_dv_local/cpu_layout.hpp"
#include "templates/gradient/kda_bwd_dv_local/layout.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_bwd_dv_local {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_bwd_dv_local";
  t.covers = {stages::kda_bwd_dv_local};
  t.constants = {constant::DTYPE, constant::V, constant::VARLEN, constant::STATE_UNIT};
  t.strided = {"do"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

std::string illegal(const Spec& s, const Limits& limits) {
  const std::int64_t BT = s.BT;
  const std::int64_t BV = s.BV;
  const std::int64_t warps = s.num_warps;
  if (std::string reason = cuda::exceeds_dimension("BV", BV, "V", s.V); !reason.empty())
    return reason;
  const std::int64_t strips = std::max<std::int64_t>(BT / 16 / warps, 1);
  const std::int64_t across = warps * strips * 16 / BT;
  if (BV % (across * 16) != 0)
    return fmt::format("num_warps={} leaves warps without columns", warps);
  if (strips > 2 || across > 4)
    return fmt::format("num_warps={} does not suit a {} by {} tile", warps, BT, BV);
  return cuda::exceeds_shared(shared_bytes(s), limits);
}

/// CUDA, sm_80 and up: one block BV value columns of a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16})},
                {tunable::BV, cuda::integers({128, 64, 32})},
                {tunable::num_warps, cuda::integers({4, 8, 2})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](Spec& s, const Limits&) {
    s.BV = s.V > 64 ? 128 : s.V > 32 ? 64 : 32;
    s.num_warps = s.BT == 64 ? 4 : 2;
    s.precision = cuda::default_precision(s);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t tiles = cuda::ceil_div(s.V, s.BV);
    return cuda::launch(e.NT * s.HV * tiles, s, shared_bytes(s));
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BV, value_columns)};
}

}  // namespace wyvern::kda_bwd_dv_local
