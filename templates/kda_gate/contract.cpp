#include "templates/column_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_gate {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_gate";
  t.stages = {"kda_gate"};
  t.summary = "g_log of a gate per key channel.";
  t.arguments = {
      {"g", Access::in, "G_DTYPE", {"B", "T", "HV", "K"}, ""},
      {"A_log", Access::in, "fp32", {"HV"}, "HAS_A_LOG"},
      {"dt_bias", Access::in, "fp32", {"HV", "K"}, "HAS_DT_BIAS"},
      {"g_log", Access::out, "fp32", {"B", "T", "HV", "K"}, ""},
  };
  t.constants = {"G_DTYPE", "HAS_A_LOG", "HAS_DT_BIAS", "LOWER_BOUND", "HV", "K"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), "ROWS", columns::all_keys), columns::cpu(stage(), "ROWS")};
}

}  // namespace wyvern::kda_gate
