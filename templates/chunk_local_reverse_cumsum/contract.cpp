#include "templates/column_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::chunk_local_reverse_cumsum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "chunk_local_reverse_cumsum";
  t.stages = {"chunk_local_reverse_cumsum"};
  t.summary = "Gradient of the log decay from that of its running sum inside each chunk.";
  t.arguments = {
      {"dG", Access::in, "fp32", {"B", "T", "GATE_HEADS"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "GATE_HEADS"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"dg", Access::out, "DG_DTYPE", {"B", "T", "GATE_HEADS"}, ""},
  };
  t.constants = {"DG_DTYPE", "GATE_K", "GATE_HEADS", "VECTOR_GATE", "VARLEN"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {columns::portable(stage(), "BT", columns::all_columns), columns::cpu(stage(), "BT")};
}

}  // namespace wyvern::chunk_local_reverse_cumsum
