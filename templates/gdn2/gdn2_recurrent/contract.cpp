#include "templates/cpu_contract.hpp"
#include "templates/decode/decode_contract.hpp"
#include "templates/gdn2/gdn2_recurrent/cpu_layout.hpp"
#include "templates/gdn2/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::gdn2_recurrent {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gdn2_recurrent";
  t.covers = {stages::gdn2_recurrent};
  t.constants = {constant::DTYPE,
                 constant::BETA_DTYPE,
                 constant::G_DTYPE,
                 constant::STATE_DTYPE,
                 constant::SEQLENS_DTYPE,
                 constant::INDEX_DTYPE,
                 constant::H,
                 constant::HV,
                 constant::K,
                 constant::V,
                 constant::VARLEN,
                 constant::GATE_IN_KERNEL,
                 constant::HAS_A_LOG,
                 constant::HAS_DT_BIAS,
                 constant::LOWER_BOUND,
                 constant::QK_L2NORM,
                 constant::INITIAL_STATE,
                 constant::FINAL_STATE,
                 constant::STATE_V_FIRST,
                 constant::INPLACE_STATE,
                 constant::STATE_INDEX};
  return t;
}

/// One call: all tokens of one sequence, one value head, BV columns of the state.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BV, {128, 64}}};
  t.illegal = [](const Spec& s, const Limits& limits) {
    const std::string problem = column_block_problem("BV", s.BV, s.V);
    return problem.empty() ? scratch_problem(scratch_bytes<ScratchLayout>(s), limits) : problem;
  };
  t.fallback = [](Spec& s, const Limits&) { s.BV = column_block(s.V, 128); };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t BV = s.BV;
    return Geometry{.grid = {(s.V + BV - 1) / BV, s.HV, e.N},
                    .shared_bytes = scratch_bytes<ScratchLayout>(s)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  // Beside the state a lane holds k, q, erase and the decay of its keys.
  return {decode::portable(stage(), 4), cpu(stage())};
}

}  // namespace wyvern::gdn2_recurrent
