#include "templates/gate/cumsum_contract.hpp"
#include "templates/gate/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::gate_cumsum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gate_cumsum";
  t.covers = {{stages::gate, {{"g_log", "g"}}}, stages::chunk_local_cumsum};
  t.summary = "The gate and its running sum inside each chunk, in one pass.";
  t.constants = {constant::G_DTYPE, constant::HAS_DT_BIAS, constant::HV};
  t.strided = {"g"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {cumsum::portable(stage()), cumsum::cpu(stage())}; }

}  // namespace wyvern::gate_cumsum
