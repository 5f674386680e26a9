#include "templates/row_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::l2norm_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "l2norm_bwd";
  t.stages = {"l2norm_bwd"};
  t.summary = "Gradient of x from that of y = x / sqrt(sum(x^2) + 1e-6).";
  t.arguments = {
      {"x", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"rstd", Access::in, "fp32", {"B", "T", "H"}, ""},
      {"dy", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"dx", Access::out, "DTYPE", {"B", "T", "H", "K"}, ""},
  };
  t.constants = {"DTYPE", "H", "K"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {rows::portable(stage()), rows::cpu(stage())}; }

}  // namespace wyvern::l2norm_bwd
