#include "templates/backward_contract.hpp"
#include "templates/cpu_contract.hpp"

namespace wyvern::wy_dqkg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "wy_dqkg";
  t.stages = {"bwd_dqkwg", "wy_bwd"};
  t.summary = "dQ, dK, dV, dbeta and dG in one kernel: dW is never formed, states are read once.";
  t.arguments = {
      {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"v_new", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"Tinv", Access::in, "DTYPE", {"B", "T", "HV", "BT"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
      {"q_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"do", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"h", Access::in, "DTYPE", {"NT", "HV", "K", "V"}, ""},
      {"dh", Access::in, "DTYPE", {"NT", "HV", "K", "V"}, ""},
      {"du", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"dq", Access::out, "DTYPE", {"B", "T", "HV", "K"}, ""},
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
  return std::max(config.integer("num_stages") * (2 * size.keys + 2 * size.states), size.values) +
         3 * size.values + 2 * size.square + 2 * size.column + size.warp_rows + size.columns +
         2 * size.row_sums + size.block_sum;
}

/// Scratch of one block, as wy_dqkg/cpu.cpp hands it out.
std::int64_t scratch_floats(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  const std::int64_t V = constants.integer("V");
  return 2 * scratch::tile(BT, V) + scratch::tile(V, BT) + 4 * scratch::tile(BT, BT) +
         5 * scratch::tile(BT, BK) + 2 * scratch::tile(V, BK) + 14 * scratch::vector(BT);
}

}  // namespace

std::vector<Template> contract() {
  return {backward::portable(stage(), shared_bytes), cpu_chunks(stage(), scratch_floats)};
}

}  // namespace wyvern::wy_dqkg
