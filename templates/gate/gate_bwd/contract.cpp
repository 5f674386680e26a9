#include "templates/gate/columns_contract.hpp"
#include "templates/gate/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::gate_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gate_bwd";
  t.covers = {stages::gate_bwd};
  t.constants = {constant::G_DTYPE, constant::HAS_DT_BIAS, constant::HV};
  t.strided = {"g"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), tunable::BT, columns::all_heads),
          columns::cpu(stage(), tunable::BT)};
}

}  // namespace wyvern::gate_bwd
