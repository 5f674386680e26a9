#include "templates/rows/rows_contract.hpp"
#include "templates/rows/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::head_sum_l2norm_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "head_sum_l2norm_bwd";
  t.covers = {stages::head_sum, stages::l2norm_bwd};
  t.summary = "Sum over value heads and the gradient through the row's norm, in one pass.";
  t.constants = {constant::DTYPE, constant::GROUP, constant::K};
  t.strided = {"x"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {rows::portable(stage()), rows::cpu(stage())}; }

}  // namespace wyvern::head_sum_l2norm_bwd
