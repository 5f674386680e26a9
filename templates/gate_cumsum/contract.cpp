#include "templates/cumsum_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::gate_cumsum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gate_cumsum";
  t.stages = {"gate", "chunk_local_cumsum"};
  t.summary = "The gate and its running sum inside each chunk, in one pass.";
  t.arguments = {
      {"g", Access::in, "G_DTYPE", {"B", "T", "HV"}, ""},
      {"A_log", Access::in, "fp32", {"HV"}, ""},
      {"dt_bias", Access::in, "fp32", {"HV"}, "HAS_DT_BIAS"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"G", Access::out, "fp32", {"B", "T", "HV"}, ""},
  };
  t.constants = {"G_DTYPE", "HAS_DT_BIAS", "HV", "VARLEN"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {cumsum::portable(stage()), cumsum::cpu(stage())}; }

}  // namespace wyvern::gate_cumsum
