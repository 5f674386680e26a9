#include "templates/cpu_contract.hpp"
#include "templates/kda_backward_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_bwd_dqkg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_bwd_dqkg";
  t.stages = {"kda_bwd_dqkg"};
  t.summary = "KDA: dv, dAqk and dA, and what goes through states of dq, dk, dbeta and dGk.";
  t.arguments = kda_backward::inputs();
  const std::vector<std::string> keys{"B", "T", "HV", "K"}, squares{"B", "T", "HV", "BT"};
  for (Argument output : {
           Argument{"dq_inter", Access::out, "fp32", keys, ""},
           Argument{"dk_inter", Access::out, "fp32", keys, ""},
           Argument{"dGk_inter", Access::out, "fp32", keys, ""},
           Argument{"dv", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
           Argument{"dbeta_inter", Access::out, "fp32", {"B", "T", "HV"}, ""},
           Argument{"dAqk", Access::out, "fp32", squares, ""},
           Argument{"dA", Access::out, "fp32", squares, ""},
       })
    t.arguments.push_back(std::move(output));
  t.constants = {"DTYPE", "BETA_DTYPE", "H",         "HV",           "K",
                 "V",     "VARLEN",     "QK_L2NORM", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

/// Scratch of one block, as kda_bwd_dqkg/cpu.cpp hands it out.
std::int64_t scratch_floats(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  return kda_backward::state_scratch(BT, BK, constants.integer("V"));
}

}  // namespace

std::vector<Template> contract() {
  return {kda_backward::portable(stage(), kda_backward::shared_bytes),
          cpu_chunks(stage(), scratch_floats)};
}

}  // namespace wyvern::kda_bwd_dqkg
