#include "templates/gate/columns_contract.hpp"
#include "templates/gate/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_cumsum_gate_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_cumsum_gate_bwd";
  t.covers = {{stages::chunk_local_reverse_cumsum, {{"dg", "dg_log"}}}, stages::kda_gate_bwd};
  t.summary = "Gradients of the raw gate per key channel from that of the running sum.";
  t.constants = {constant::G_DTYPE, constant::HAS_A_LOG, constant::HAS_DT_BIAS,
                 constant::LOWER_BOUND, constant::K};
  t.strided = {"g"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), tunable::BT, columns::keys_of_a_head),
          columns::cpu(stage(), tunable::BT)};
}

}  // namespace wyvern::kda_cumsum_gate_bwd
