#include "templates/gate/columns_contract.hpp"
#include "templates/gate/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::cumsum_gate_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "cumsum_gate_bwd";
  t.covers = {{stages::chunk_local_reverse_cumsum, {{"dg", "dg_log"}}}, stages::gate_bwd};
  t.summary = "Gradients of the raw gate from that of the running sum, in one pass.";
  t.constants = {constant::G_DTYPE, constant::HAS_DT_BIAS, constant::HV};
  t.strided = {"g"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), tunable::BT, columns::all_heads),
          columns::cpu(stage(), tunable::BT)};
}

}  // namespace wyvern::cumsum_gate_bwd
