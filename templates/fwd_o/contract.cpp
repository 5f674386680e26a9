#include "templates/template.hpp"

namespace wyvern::fwd_o {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_o";
  t.stages = {"fwd_o"};
  t.summary = "O = scale ((exp(G) Q) S + P V'), per chunk.";
  t.arguments = {
      {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v_new", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"h", Access::in, "DTYPE", {"NT", "HV", "K", "V"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"o", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
  };
  t.constants = {"DTYPE", "H", "HV", "K", "V", "VARLEN"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {}; }

}  // namespace wyvern::fwd_o
