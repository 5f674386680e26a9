#include "templates/template.hpp"

namespace wyvern::chunk_index {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "chunk_index";
  t.stages = {"chunk_index"};
  t.summary = "Sequence and chunk tables of a packed batch.";
  t.arguments = {
      {"cu_seqlens", Access::in, "SEQLENS_DTYPE", {"N+1"}, ""},
      {"seq_offsets", Access::out, "int32", {"N+1"}, ""},
      {"chunk_offsets", Access::out, "int32", {"N+1"}, ""},
      {"chunk_index", Access::out, "int32", {"NT", "2"}, ""},
  };
  t.constants = {"SEQLENS_DTYPE"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {}; }

}  // namespace wyvern::chunk_index
