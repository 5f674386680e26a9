#include "templates/backward_contract.hpp"
#include "templates/cpu_contract.hpp"

namespace wyvern::wy_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "wy_bwd";
  t.stages = {"wy_bwd"};
  t.summary = "dV, dbeta, and W's, U's and A's part added to dK and to the gate's gradient.";
  t.arguments = {
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"v_new", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"Tinv", Access::in, "DTYPE", {"B", "T", "HV", "BT"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
      {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"du", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"dw", Access::in, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"dk_qk", Access::in, "fp32", {"B", "T", "HV", "K"}, ""},
      {"dG_qk", Access::in, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"dk", Access::out, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"dv", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"dbeta", Access::out, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"dG", Access::out, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
  };
  t.constants = {"DTYPE",  "BETA_DTYPE",  "H",         "HV",           "K",         "V",
                 "VARLEN", "SCALAR_GATE", "QK_L2NORM", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const backward::Sizes size(constants, config);
  return std::max(config.integer("num_stages") * 2 * size.keys, size.values) + 2 * size.values +
         2 * size.square + size.column + size.warp_rows + size.columns + 2 * size.row_sums;
}

/// Scratch of one block, as wy_bwd/cpu.cpp hands it out.
std::int64_t scratch_floats(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  const std::int64_t V = constants.integer("V");
  return 2 * scratch::tile(BT, V) + scratch::tile(V, BT) + 4 * scratch::tile(BT, BT) +
         4 * scratch::tile(BT, BK) + 9 * scratch::vector(BT);
}

}  // namespace

std::vector<Template> contract() {
  return {backward::portable(stage(), shared_bytes), cpu_chunks(stage(), scratch_floats)};
}

}  // namespace wyvern::wy_bwd
