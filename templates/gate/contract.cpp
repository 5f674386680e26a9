#include "templates/template.hpp"

namespace wyvern::gate {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gate";
  t.stages = {"gate"};
  t.summary = "g_log = -exp(A_log) * softplus(g + dt_bias).";
  t.arguments = {
      {"g", Access::in, "G_DTYPE", {"B", "T", "HV"}, ""},
      {"A_log", Access::in, "fp32", {"HV"}, ""},
      {"dt_bias", Access::in, "fp32", {"HV"}, "HAS_DT_BIAS"},
      {"g_log", Access::out, "fp32", {"B", "T", "HV"}, ""},
  };
  t.constants = {"G_DTYPE", "HAS_DT_BIAS", "HV"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {}; }

}  // namespace wyvern::gate
