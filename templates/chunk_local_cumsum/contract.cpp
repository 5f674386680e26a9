#include "templates/cumsum_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::chunk_local_cumsum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "chunk_local_cumsum";
  t.stages = {"chunk_local_cumsum"};
  t.summary = "Running sum of the log decay inside each chunk.";
  t.arguments = {
      {"g", Access::in, "G_DTYPE", {"B", "T", "GATE_HEADS"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"G", Access::out, "fp32", {"B", "T", "GATE_HEADS"}, ""},
  };
  t.constants = {"G_DTYPE", "GATE_HEADS", "VARLEN"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {cumsum::portable(stage()), cumsum::cpu(stage())}; }

}  // namespace wyvern::chunk_local_cumsum
