#include "templates/row_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::head_sum_l2norm_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "head_sum_l2norm_bwd";
  t.stages = {"head_sum", "l2norm_bwd"};
  t.summary = "Sum over value heads and the gradient through the row's norm, in one pass.";
  t.arguments = {
      {"x", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"rstd", Access::in, "fp32", {"B", "T", "H"}, ""},
      {"dy_heads", Access::in, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"dx", Access::out, "DTYPE", {"B", "T", "H", "K"}, ""},
  };
  t.constants = {"DTYPE", "H", "HV", "K"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {rows::portable(stage()), rows::cpu(stage())}; }

}  // namespace wyvern::head_sum_l2norm_bwd
