#include "templates/row_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::l2norm_rstd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "l2norm_rstd";
  t.stages = {"l2norm_rstd"};
  t.summary = "rstd = 1 / sqrt(sum(x^2) + 1e-6) over the last dimension.";
  t.arguments = {
      {"x", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"rstd", Access::out, "fp32", {"B", "T", "H"}, ""},
  };
  t.constants = {"DTYPE", "H", "K"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {rows::portable(stage()), rows::cpu(stage())}; }

}  // namespace wyvern::l2norm_rstd
