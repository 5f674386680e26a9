#include "templates/gate/cumsum_contract.hpp"
#include "templates/gate/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::chunk_local_cumsum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "chunk_local_cumsum";
  t.covers = {stages::chunk_local_cumsum};
  t.constants = {constant::G_DTYPE, constant::GATE_HEADS};
  t.strided = {"g"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {cumsum::portable(stage()), cumsum::cpu(stage())}; }

}  // namespace wyvern::chunk_local_cumsum
