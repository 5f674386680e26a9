#include "templates/gate/columns_contract.hpp"
#include "templates/gate/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::chunk_local_reverse_cumsum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "chunk_local_reverse_cumsum";
  t.covers = {stages::chunk_local_reverse_cumsum};
  t.constants = {constant::DG_DTYPE, constant::GATE_K, constant::GATE_HEADS, constant::VECTOR_GATE};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), tunable::BT, columns::all_columns),
          columns::cpu(stage(), tunable::BT)};
}

}  // namespace wyvern::chunk_local_reverse_cumsum
