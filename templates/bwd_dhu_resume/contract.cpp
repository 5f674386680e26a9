#include "templates/reverse_scan_contract.hpp"

namespace wyvern::bwd_dhu_resume {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu_resume";
  t.stages = {"bwd_dhu"};
  t.summary = "The reverse state scan of all segments at once, from the gradients at their ends.";
  t.arguments = scan::joined(
      reverse_scan::kInputs,
      {
          {"segment_dstate", Access::in, "fp32", {"NS", "HV", "K", "V"}, ""},
          {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
          {"chunk_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
          {"dh", Access::out, "DTYPE", {"NT", "HV", "K", "V"}, ""},
          {"du", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
          {"dinitial_state", Access::out, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"},
           "INITIAL_STATE"},
      });
  t.constants = scan::joined(reverse_scan::kConstants, {"INITIAL_STATE", "STATE_V_FIRST"});
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), reverse_scan::kReverse, scan::Walk::segment);
}

}  // namespace wyvern::bwd_dhu_resume
