#include "templates/combine_contract.hpp"

namespace wyvern::bwd_dhu_combine {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu_combine";
  t.stages = {"bwd_dhu_combine"};
  t.summary = "The gradients of the states that leave segments, from what each does to them.";
  t.arguments = {
      {"segment_dM", Access::in, "fp32", {"NS", "HV", "K", "K"}, ""},
      {"segment_dR", Access::in, "fp32", {"NS", "HV", "K", "V"}, ""},
      {"dht", Access::in, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"}, "FINAL_STATE"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"segment_dstate", Access::out, "fp32", {"NS", "HV", "K", "V"}, ""},
  };
  t.constants = {"DTYPE", "HV", "K", "V", "VARLEN", "FINAL_STATE", "STATE_V_FIRST"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {combine::portable(stage()), combine::cpu(stage())}; }

}  // namespace wyvern::bwd_dhu_combine
