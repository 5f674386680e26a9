#include "templates/forward/kda_prepare/layout.hpp"
#include "templates/gate/stages.hpp"
#include "templates/hopper_contract.hpp"
#include "templates/intra/stages.hpp"
#include "templates/rows/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_prepare {
namespace {

TiledView keys(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.H, s.K, kChunk, s.K / 64);
}
TiledView values(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kChunk, s.V / 64);
}
TiledView gates(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.G_DTYPE, s.HV, s.K, kChunk,
                        s.K * static_cast<std::int64_t>(size_of(s.G_DTYPE)) / 128);
}

std::string illegal(const Spec& s, const Limits& limits) {
  if (s.BT != kChunk) return fmt::format("BT={} is not the {} of its products", s.BT, kChunk);
  if (!cuda::is_half(s)) return "wgmma has no fp32 products";
  if (s.U_DTYPE != s.DTYPE) return "U is written in 16 bits";
  if (s.K != 64 && s.K != 128)
    return fmt::format("K={} is not one of 64 and 128, of which eight warps can hold the gates",
                       s.K);
  if (s.num_warps * 8 > s.K)
    return fmt::format("num_warps={} leaves warps without channels", s.num_warps);
  if (s.V % 64 != 0) return fmt::format("V={} is not a multiple of 64", s.V);
  if (s.NEG_EIGVAL) return "states that need not decay want more digits than 16-bit products keep";
  if (s.KEEP_STATES || s.KEEP_INVERSE) return "norms and the inverse stay on chip";
  return cuda::exceeds_shared(HopperLayout(s).bytes, limits);
}

/// Hopper: one block a chunk and value head.
Template prepare() {
  Template t;
  t.name = "kda_prepare";
  t.variant = "hopper";
  t.source = "hopper.cu";
  t.summary = "All of a chunk that needs no state, for a gate a key channel, in one kernel.";
  t.covers = {
      hopper::when({stages::l2norm_rstd, {{"x", "q"}, {"rstd", "q_rstd"}}}, {constant::QK_L2NORM}),
      hopper::when({stages::l2norm_rstd, {{"x", "k"}, {"rstd", "k_rstd"}}}, {constant::QK_L2NORM}),
      hopper::when({stages::kda_gate, {{"g_log", "g"}}}, {constant::GATE_IN_KERNEL}),
      {stages::chunk_local_cumsum, {{"G", "Gk"}}},
      stages::kda_intra,
      stages::solve_tril,
      stages::kda_recompute_w_u};
  t.keeps = {{"Gk", {}}};
  t.constants = {constant::DTYPE,
                 constant::U_DTYPE,
                 constant::BETA_DTYPE,
                 constant::G_DTYPE,
                 constant::H,
                 constant::HV,
                 constant::K,
                 constant::V,
                 constant::VARLEN,
                 constant::SCALAR_GATE,
                 constant::VECTOR_GATE,
                 constant::GATE_IN_KERNEL,
                 constant::HAS_A_LOG,
                 constant::HAS_DT_BIAS,
                 constant::LOWER_BOUND,
                 constant::QK_L2NORM,
                 constant::BETA_SIGMOID,
                 constant::NEG_EIGVAL};
  t.needs.wgmma = t.needs.tensor_copies = true;
  t.tunables = {{tunable::BT, cuda::integers({kChunk})},
                {tunable::num_warps, cuda::integers({16, 8})}};
  t.tensor_maps = {{.name = "q_map", .argument = "q", .view = keys},
                   {.name = "k_map", .argument = "k", .view = keys},
                   {.name = "v_map", .argument = "v", .view = values},
                   {.name = "g_map", .argument = "g", .view = gates}};
  t.strided = {"q", "k", "v", "beta", "g"};
  t.illegal = illegal;
  t.fallback = [](Spec& s, const Limits&) { s.num_warps = 8; };
  t.fit = [](Spec& s, const Limits& limits, const PlanShape& shape) {
    const std::int64_t blocks = shape.sequences * cuda::ceil_div(shape.tokens, s.BT) * s.HV;
    if (s.K == 128 && blocks <= limits.multiprocessors) s.num_warps = 16;
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {e.NT * s.HV, 1, 1},
                    .threads = 32 * s.num_warps,
                    .shared_bytes = HopperLayout(s).bytes};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {prepare()}; }

}  // namespace wyvern::kda_prepare
