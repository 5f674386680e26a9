#include "templates/combine_contract.hpp"

namespace wyvern::fwd_h_combine {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h_combine";
  t.stages = {"fwd_h_combine"};
  t.summary = "The states that enter segments, from what each segment does to a state.";
  t.arguments = {
      {"segment_M", Access::in, "fp32", {"NS", "HV", "K", "K"}, ""},
      {"segment_R", Access::in, "fp32", {"NS", "HV", "K", "V"}, ""},
      {"initial_state",
       Access::in,
       "STATE_DTYPE",
       {"N", "HV", "STATE_ROWS", "STATE_COLS"},
       "INITIAL_STATE"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"segment_state", Access::out, "fp32", {"NS", "HV", "K", "V"}, ""},
  };
  t.constants = {"DTYPE",  "STATE_DTYPE",   "HV",           "K", "V",
                 "VARLEN", "INITIAL_STATE", "STATE_V_FIRST"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {combine::portable(stage()), combine::cpu(stage())}; }

}  // namespace wyvern::fwd_h_combine
