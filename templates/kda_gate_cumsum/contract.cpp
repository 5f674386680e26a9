#include "templates/column_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_gate_cumsum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_gate_cumsum";
  t.stages = {"kda_gate", "chunk_local_cumsum"};
  t.summary = "The gate per key channel and its running sum inside each chunk, in one pass.";
  t.arguments = {
      {"g", Access::in, "G_DTYPE", {"B", "T", "HV", "K"}, ""},
      {"A_log", Access::in, "fp32", {"HV"}, "HAS_A_LOG"},
      {"dt_bias", Access::in, "fp32", {"HV", "K"}, "HAS_DT_BIAS"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"G", Access::out, "fp32", {"B", "T", "HV", "K"}, ""},
  };
  t.constants = {"G_DTYPE", "HAS_A_LOG", "HAS_DT_BIAS", "LOWER_BOUND", "HV", "K", "VARLEN"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), "BT", columns::all_keys), columns::cpu(stage(), "BT")};
}

}  // namespace wyvern::kda_gate_cumsum
