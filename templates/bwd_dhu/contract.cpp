#include "templates/reverse_scan_contract.hpp"

namespace wyvern::bwd_dhu {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu";
  t.stages = {"bwd_dhu_segment", "bwd_dhu_combine", "bwd_dhu"};
  t.summary = "The reverse state scan: the gradient of every chunk's leaving state, and dU.";
  t.arguments = scan::joined(
      reverse_scan::kInputs,
      {
          {"dht", Access::in, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"}, "FINAL_STATE"},
          {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
          {"chunk_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
          {"dh", Access::out, "DTYPE", {"NT", "HV", "K", "V"}, ""},
          {"du", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
          {"dinitial_state", Access::out, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"},
           "INITIAL_STATE"},
      });
  t.constants = scan::joined(reverse_scan::kConstants,
                             {"INITIAL_STATE", "FINAL_STATE", "STATE_V_FIRST"});
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), reverse_scan::kReverse, scan::Walk::sequence);
}

}  // namespace wyvern::bwd_dhu
