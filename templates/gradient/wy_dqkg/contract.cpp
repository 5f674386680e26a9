#include "templates/cpu_contract.hpp"
#include "templates/gradient/backward_contract.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/gradient/wy_dqkg/cpu_layout.hpp"
#include "templates/gradient/wy_dqkg/layout.hpp"

namespace wyvern::wy_dqkg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "wy_dqkg";
  t.covers = {stages::bwd_dqkwg, stages::wy_bwd};
  t.summary = "dQ, dK, dV, dbeta and dG in one kernel: dW is never formed, states are read once.";
  t.constants = {constant::DTYPE,     constant::BETA_DTYPE,   constant::K,
                 constant::V,         constant::VARLEN,       constant::SCALAR_GATE,
                 constant::QK_L2NORM, constant::BETA_SIGMOID, constant::NEG_EIGVAL,
                 constant::STEPS};
  t.strided = {"q", "k", "v", "beta", "do"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// On an H200 with chunks of 64 tokens 884 us instead of 992 with four warps, of 32 718 instead of
/// 789 with half the columns.
backward::Division fastest(const Spec& s) {
  if (s.BT == 16) return backward::usual(s);
  return s.BT == 64 ? backward::Division{32, 8} : backward::Division{64, 4};
}

}  // namespace

std::vector<Template> contract() {
  return {backward::portable(stage(), shared_bytes, fastest),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BK, key_columns)};
}

}  // namespace wyvern::wy_dqkg
