#include "templates/gate/columns_contract.hpp"
#include "templates/gate/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_gate_cumsum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_gate_cumsum";
  t.covers = {{stages::kda_gate, {{"g_log", "g"}}}, stages::chunk_local_cumsum};
  t.summary = "The gate per key channel and its running sum inside each chunk, in one pass.";
  t.constants = {constant::G_DTYPE,     constant::HAS_A_LOG, constant::HAS_DT_BIAS,
                 constant::LOWER_BOUND, constant::HV,        constant::K};
  t.strided = {"g"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), tunable::BT, columns::all_keys),
          columns::cpu(stage(), tunable::BT)};
}

}  // namespace wyvern::kda_gate_cumsum
