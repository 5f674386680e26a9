#include "templates/template.hpp"

namespace wyvern::kkt_solve_wu {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kkt_solve_wu";
  t.stages = {"scaled_dot_kkt", "solve_tril", "recompute_w_u"};
  t.summary = "W and U from k, v, beta and G in one kernel: A and its inverse stay on chip.";
  t.arguments = {
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"w", Access::out, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"u", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
  };
  t.constants = {"DTYPE", "BETA_DTYPE", "H", "HV", "K", "V", "VARLEN", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {}; }

}  // namespace wyvern::kkt_solve_wu
