#include "templates/cpu_contract.hpp"
#include "templates/gradient/backward_contract.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/gradient/wy_dqkg/layout.hpp"

namespace wyvern::wy_dqkg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "wy_dqkg";
  t.covers = {stages::bwd_dqkwg, stages::wy_bwd};
  t.summary = "dQ, dK, dV, dbeta and dG in one kernel: dW is never formed, states are read once.";
  t.constants = {constant::DTYPE,        constant::BETA_DTYPE,  constant::H,
                 constant::HV,           constant::K,           constant::V,
                 constant::VARLEN,       constant::SCALAR_GATE, constant::QK_L2NORM,
                 constant::BETA_SIGMOID, constant::NEG_EIGVAL};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// Scratch of one block, as wy_dqkg/cpu.cpp hands it out.
std::int64_t scratch_floats(const Spec& s) {
  const std::int64_t BT = s.BT, BK = s.BK;
  const std::int64_t V = s.V;
  return 2 * scratch::tile(BT, V) + scratch::tile(V, BT) + 4 * scratch::tile(BT, BT) +
         5 * scratch::tile(BT, BK) + 2 * scratch::tile(V, BK) + 14 * scratch::vector(BT);
}

}  // namespace

std::vector<Template> contract() {
  return {backward::portable(stage(), shared_bytes), cpu_chunks(stage(), scratch_floats)};
}

}  // namespace wyvern::wy_dqkg
