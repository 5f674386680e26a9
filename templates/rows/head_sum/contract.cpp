#include "templates/rows/rows_contract.hpp"
#include "templates/rows/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::head_sum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "head_sum";
  t.covers = {stages::head_sum};
  t.constants = {constant::DTYPE, constant::GROUP, constant::K};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {rows::portable(stage()), rows::cpu(stage())}; }

}  // namespace wyvern::head_sum
