#include "templates/cpu_contract.hpp"
#include "templates/decode/decode_contract.hpp"
#include "templates/gdn2/gdn2_recurrent/cpu_layout.hpp"
#include "templates/gdn2/stages.hpp"
#include "templates/pool_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::gdn2_recurrent {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gdn2_recurrent";
  t.covers = {stages::gdn2_recurrent};
  t.constants = pool::with_slots(
      {constant::DTYPE, constant::BETA_DTYPE, constant::G_DTYPE, constant::SEQLENS_DTYPE,
       constant::GROUP, constant::K, constant::V, constant::VARLEN, constant::GATE_IN_KERNEL,
       constant::HAS_A_LOG, constant::HAS_DT_BIAS, constant::LOWER_BOUND, constant::QK_L2NORM,
       constant::FINAL_STATE, constant::STATE_V_FIRST});
  t.strided = {"q", "k", "v", "erase", "write", "g", "o", "state"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  // Beside the state a lane holds k, q, erase and the decay of its keys.
  return {decode::portable(stage(), 4), decode::cpu(stage(), scratch_bytes<ScratchLayout>)};
}

}  // namespace wyvern::gdn2_recurrent
