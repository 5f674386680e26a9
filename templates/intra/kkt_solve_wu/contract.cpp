#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/intra/kkt_solve_wu/cpu_layout.hpp"
#include "templates/intra/kkt_solve_wu/layout.hpp"
#include "templates/intra/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kkt_solve_wu {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kkt_solve_wu";
  t.covers = {stages::scaled_dot_kkt, stages::solve_tril, stages::recompute_w_u};
  t.keeps = {{"Tinv", {constant::KEEP_INVERSE}}};
  t.summary = "W and U from k, v, beta and G in one kernel: A and its inverse stay on chip.";
  t.constants = {constant::DTYPE,        constant::U_DTYPE,     constant::STATE_UNIT,
                 constant::BETA_DTYPE,   constant::K,           constant::V,
                 constant::VARLEN,       constant::SCALAR_GATE, constant::QK_L2NORM,
                 constant::BETA_SIGMOID, constant::NEG_EIGVAL,  constant::KEEP_STATES};
  t.strided = {"k", "v", "beta"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

std::string illegal(const Spec& s, const Limits& limits) {
  const std::int64_t BT = s.BT;
  const std::int64_t BV = s.BV;
  const std::int64_t warps = s.num_warps;
  if (std::string reason = cuda::exceeds_dimension("BV", BV, "V", s.V); !reason.empty())
    return reason;
  if (warps * 32 < BT) return fmt::format("num_warps={} is less than BT/32={}", warps, BT / 32);
  if (warps * 8 > BV) return fmt::format("num_warps={} leaves warps without columns", warps);
  return cuda::exceeds_shared(shared_bytes(s), limits);
}

/// CUDA, sm_80 and up: one block a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16})},
                {tunable::BV, cuda::integers({128, 64, 32})},
                {tunable::num_warps, cuda::integers({4, 8, 2})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = illegal;
  t.redundant = [](const Spec& s) { return s.BT == 16 && cuda::repeats_precision(s); };
  t.fallback = [](Spec& s, const Limits&) {
    const bool half = cuda::is_half(s);
    s.BV = s.V > 64 && half ? 128 : s.V > 32 ? 64 : 32;
    s.num_warps = s.BT >= 64 || s.BV == 128 ? 4 : 2;
    s.precision = !half ? Precision::tf32x3 : s.BT == 16 ? Precision::ieee : Precision::tf32;
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(), cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BV,
                                            value_columns, constant::H)};
}

}  // namespace wyvern::kkt_solve_wu
