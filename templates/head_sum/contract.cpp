#include "templates/row_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::head_sum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "head_sum";
  t.stages = {"head_sum"};
  t.summary = "Sum of the gradients of a query or key head over its value heads.";
  t.arguments = {
      {"dy_heads", Access::in, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"dy", Access::out, "DTYPE", {"B", "T", "H", "K"}, ""},
  };
  t.constants = {"DTYPE", "H", "HV", "K"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {rows::portable(stage()), rows::cpu(stage())}; }

}  // namespace wyvern::head_sum
