#include "templates/row_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::l2norm {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "l2norm";
  t.stages = {"l2norm"};
  t.summary = "y = x / sqrt(sum(x^2) + 1e-6) over the last dimension.";
  t.arguments = {
      {"x", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"y", Access::out, "DTYPE", {"B", "T", "H", "K"}, ""},
  };
  t.constants = {"DTYPE", "H", "K"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {rows::portable(stage()), rows::cpu(stage())}; }

}  // namespace wyvern::l2norm
