#include "templates/cpu_contract.hpp"
#include "templates/gradient/kda_backward_contract.hpp"
#include "templates/gradient/kda_wy_dqkg/layout.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_wy_dqkg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_wy_dqkg";
  t.covers = {stages::kda_bwd_dqkg, stages::kda_intra_bwd};
  t.summary = "KDA: dq, dk, dv, dbeta and dGk of a chunk at once.";
  t.constants = {constant::DTYPE,        constant::BETA_DTYPE, constant::H,
                 constant::HV,           constant::K,          constant::V,
                 constant::VARLEN,       constant::SAFE_GATE,  constant::QK_L2NORM,
                 constant::BETA_SIGMOID, constant::NEG_EIGVAL};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// kda_backward's, with a minimum of blocks a multiprocessor.
Template portable() {
  Template t = kda_backward::portable(stage(), shared_bytes);
  t.tunables.insert(t.tunables.end() - 1, {tunable::min_blocks, cuda::integers({0, 2, 4})});
  t.illegal = [rest = t.illegal](const Spec& s, const Limits& limits) {
    const std::string reason = rest(s, limits);
    return reason.empty() ? cuda::min_blocks_problem(s, shared_bytes(s), limits) : reason;
  };
  return t;
}

/// Scratch of one block, as kda_wy_dqkg/cpu.cpp hands it out.
std::int64_t scratch_floats(const Spec& s) {
  const std::int64_t BT = s.BT, BK = s.BK;
  return kda_backward::state_scratch(BT, BK, s.V) + kda_backward::intra_scratch(BT, BK) +
         2 * scratch::tile(BT, BT) + 2 * scratch::vector(BT) + scratch::vector(BT * 16);
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu_chunks(stage(), scratch_floats)}; }

}  // namespace wyvern::kda_wy_dqkg
