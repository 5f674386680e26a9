#include "templates/template.hpp"

namespace wyvern::scaled_dot_kkt {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "scaled_dot_kkt";
  t.stages = {"scaled_dot_kkt"};
  t.summary = "A = strictly lower part of beta_r exp(G_r - G_s) k_r . k_s, per chunk.";
  t.arguments = {
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"A", Access::out, "fp32", {"B", "T", "HV", "BT"}, ""},
  };
  t.constants = {"DTYPE", "BETA_DTYPE", "H", "HV", "K", "VARLEN", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {}; }

}  // namespace wyvern::scaled_dot_kkt
