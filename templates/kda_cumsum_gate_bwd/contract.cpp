#include "templates/column_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_cumsum_gate_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_cumsum_gate_bwd";
  t.stages = {"chunk_local_reverse_cumsum", "kda_gate_bwd"};
  t.summary = "Gradients of the raw gate per key channel from that of the running sum.";
  t.arguments = {
      {"g", Access::in, "G_DTYPE", {"B", "T", "HV", "K"}, ""},
      {"A_log", Access::in, "fp32", {"HV"}, "HAS_A_LOG"},
      {"dt_bias", Access::in, "fp32", {"HV", "K"}, "HAS_DT_BIAS"},
      {"dG", Access::in, "fp32", {"B", "T", "HV", "K"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV", "K"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"dg_raw", Access::out, "G_DTYPE", {"B", "T", "HV", "K"}, ""},
      {"dA_part", Access::out, "fp32", {"NT", "HV"}, "HAS_A_LOG"},
      {"dbias_part", Access::out, "fp32", {"NT", "HV", "K"}, "HAS_DT_BIAS"},
  };
  t.constants = {"G_DTYPE", "HAS_A_LOG", "HAS_DT_BIAS", "LOWER_BOUND", "HV", "K", "VARLEN"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), "BT", columns::keys_of_a_head), columns::cpu(stage(), "BT")};
}

}  // namespace wyvern::kda_cumsum_gate_bwd
