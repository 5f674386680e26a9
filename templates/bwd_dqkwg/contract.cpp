#include "templates/backward_contract.hpp"
#include "templates/cpu_contract.hpp"

namespace wyvern::bwd_dqkwg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dqkwg";
  t.stages = {"bwd_dqkwg"};
  t.summary = "dQ, dW and attention's and the state's part of dK and of the gate's gradient.";
  t.arguments = {
      {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v_new", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"do", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"h", Access::in, "DTYPE", {"NT", "HV", "K", "V"}, ""},
      {"dh", Access::in, "DTYPE", {"NT", "HV", "K", "V"}, ""},
      {"du", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
      {"q_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"dq", Access::out, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"dk_qk", Access::out, "fp32", {"B", "T", "HV", "K"}, ""},
      {"dw", Access::out, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"dG_qk", Access::out, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
  };
  t.constants = {"DTYPE", "H", "HV", "K", "V", "VARLEN", "SCALAR_GATE", "QK_L2NORM"};
  return t;
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const backward::Sizes size(constants, config);
  return config.integer("num_stages") * (2 * size.keys + 2 * size.states) + 3 * size.values +
         size.square + size.column + size.columns + size.row_sums + size.block_sum;
}

/// Scratch of one block, as bwd_dqkwg/cpu.cpp hands it out.
std::int64_t scratch_floats(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  const std::int64_t V = constants.integer("V");
  return 2 * scratch::tile(BT, V) + scratch::tile(V, BT) + 2 * scratch::tile(BT, BT) +
         5 * scratch::tile(BT, BK) + 2 * scratch::tile(V, BK) + 9 * scratch::vector(BT);
}

}  // namespace

std::vector<Template> contract() {
  return {backward::portable(stage(), shared_bytes), cpu_chunks(stage(), scratch_floats)};
}

}  // namespace wyvern::bwd_dqkwg
