#include "templates/cpu_contract.hpp"
#include "templates/decode/decode_contract.hpp"
#include "templates/decode/recurrent/cpu_layout.hpp"
#include "templates/decode/stages.hpp"
#include "templates/pool_contract.hpp"

namespace wyvern::recurrent {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "recurrent";
  t.covers = {stages::recurrent};
  t.constants = pool::with_slots({constant::DTYPE,
                                  constant::BETA_DTYPE,
                                  constant::G_DTYPE,
                                  constant::SEQLENS_DTYPE,
                                  constant::GROUP,
                                  constant::K,
                                  constant::V,
                                  constant::GATE_K,
                                  constant::STEPS,
                                  constant::VARLEN,
                                  constant::GATED,
                                  constant::SCALAR_GATE,
                                  constant::VECTOR_GATE,
                                  constant::GATE_IN_KERNEL,
                                  constant::HAS_A_LOG,
                                  constant::HAS_DT_BIAS,
                                  constant::LOWER_BOUND,
                                  constant::QK_L2NORM,
                                  constant::BETA_SIGMOID,
                                  constant::NEG_EIGVAL,
                                  constant::ERASE_WRITE,
                                  constant::FINAL_STATE,
                                  constant::STATE_V_FIRST,
                                  constant::INDEX_COLUMNS,
                                  constant::INTERMEDIATE_STATES,
                                  constant::PARENT,
                                  constant::KEEP_POOL});
  t.strided = {"q", "k", "v", "beta", "erase", "write", "g", "o", "state"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {decode::portable(stage()), decode::cpu(stage(), scratch_bytes<ScratchLayout>)};
}

}  // namespace wyvern::recurrent
