#include "templates/gate/columns_contract.hpp"
#include "templates/gate/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_gate {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_gate";
  t.covers = {stages::kda_gate};
  t.constants = {constant::G_DTYPE,     constant::HAS_A_LOG, constant::HAS_DT_BIAS,
                 constant::LOWER_BOUND, constant::HV,        constant::K};
  t.strided = {"g"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), tunable::ROWS, columns::all_keys),
          columns::cpu(stage(), tunable::ROWS)};
}

}  // namespace wyvern::kda_gate
