#include "templates/cpu_contract.hpp"
#include "templates/device/cpu/kda_layout.hpp"
#include "templates/device/cuda/kda_layout.hpp"
#include "templates/gradient/kda_backward_contract.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_bwd_dqkg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_bwd_dqkg";
  t.covers = {stages::kda_bwd_dqkg};
  t.constants = {constant::DTYPE,
                 constant::BETA_DTYPE,
                 constant::K,
                 constant::V,
                 constant::VARLEN,
                 constant::QK_L2NORM,
                 constant::BETA_SIGMOID,
                 constant::NEG_EIGVAL};
  t.strided = {"q", "k", "v", "beta", "erase", "write", "do"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return cuda::kda::StateBackwardLayout(s).bytes; }

}  // namespace

std::vector<Template> contract() {
  return {kda_backward::portable(stage(), shared_bytes),
          cpu_chunks_by_columns(stage(), scratch_bytes<cpu::RateBackwardLayout>, tunable::BK,
                                key_columns)};
}

}  // namespace wyvern::kda_bwd_dqkg
