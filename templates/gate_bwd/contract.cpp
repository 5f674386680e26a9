#include "templates/column_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::gate_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gate_bwd";
  t.stages = {"gate_bwd"};
  t.summary = "Gradients of the raw gate, and each chunk's part of those of A_log and dt_bias.";
  t.arguments = {
      {"g", Access::in, "G_DTYPE", {"B", "T", "HV"}, ""},
      {"A_log", Access::in, "fp32", {"HV"}, ""},
      {"dt_bias", Access::in, "fp32", {"HV"}, "HAS_DT_BIAS"},
      {"dg_log", Access::in, "fp32", {"B", "T", "HV"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"dg_raw", Access::out, "G_DTYPE", {"B", "T", "HV"}, ""},
      {"dA_part", Access::out, "fp32", {"NT", "HV"}, ""},
      {"dbias_part", Access::out, "fp32", {"NT", "HV"}, "HAS_DT_BIAS"},
  };
  t.constants = {"G_DTYPE", "HAS_DT_BIAS", "HV", "VARLEN"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), "BT", columns::all_heads), columns::cpu(stage(), "BT")};
}

}  // namespace wyvern::gate_bwd
