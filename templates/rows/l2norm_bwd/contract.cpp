#include "templates/rows/rows_contract.hpp"
#include "templates/rows/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::l2norm_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "l2norm_bwd";
  t.covers = {stages::l2norm_bwd};
  t.constants = {constant::DTYPE, constant::K};
  t.strided = {"x"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {rows::portable(stage()), rows::cpu(stage())}; }

}  // namespace wyvern::l2norm_bwd
