#include "templates/template.hpp"

namespace wyvern::solve_tril {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "solve_tril";
  t.stages = {"solve_tril"};
  t.summary = "Tinv = (I + A)^-1, per chunk.";
  t.arguments = {
      {"A", Access::in, "fp32", {"B", "T", "HV", "BT"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"Tinv", Access::out, "DTYPE", {"B", "T", "HV", "BT"}, ""},
  };
  t.constants = {"DTYPE", "HV", "VARLEN"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {}; }

}  // namespace wyvern::solve_tril
