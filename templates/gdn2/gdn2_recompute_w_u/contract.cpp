#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/gdn2/gdn2_recompute_w_u/cpu_layout.hpp"
#include "templates/gdn2/gdn2_recompute_w_u/layout.hpp"
#include "templates/gdn2/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::gdn2_recompute_w_u {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gdn2_recompute_w_u";
  t.covers = {stages::gdn2_recompute_w_u};
  t.constants = {constant::DTYPE, constant::U_DTYPE, constant::BETA_DTYPE,
                 constant::H,     constant::HV,      constant::K,
                 constant::V,     constant::VARLEN,  constant::QK_L2NORM};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

std::string illegal(const Spec& s, const Limits& limits) {
  const std::int64_t BK = s.BK, BV = s.BV;
  for (std::string reason :
       {cuda::exceeds_dimension("BK", BK, "K", s.K), cuda::exceeds_dimension("BV", BV, "V", s.V)})
    if (!reason.empty()) return reason;
  if (s.num_warps * 16 > std::max(BK, BV))
    return fmt::format("num_warps={} leaves warps without columns", s.num_warps);
  return cuda::exceeds_shared(shared_bytes(s), limits);
}

/// CUDA, sm_80 and up: one block a tile of columns of W, qg and kg, or of U.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16})},
                {tunable::BK, cuda::integers({64, 128, 32})},
                {tunable::BV, cuda::integers({64, 128, 32})},
                {tunable::num_warps, cuda::integers({4, 2, 8})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](Spec& s, const Limits&) {
    s.BK = s.K > 32 ? 64 : 32;
    s.BV = s.V > 32 ? 64 : 32;
    s.num_warps = 2;
    s.precision = cuda::default_precision(s);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t tiles = cuda::ceil_div(s.K, s.BK) + cuda::ceil_div(s.V, s.BV);
    return cuda::launch(e.NT * s.HV * tiles, s, shared_bytes(s));
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BV, all_columns)};
}

}  // namespace wyvern::gdn2_recompute_w_u
