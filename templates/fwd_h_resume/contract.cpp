#include "templates/scan_contract.hpp"

namespace wyvern::fwd_h_resume {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h_resume";
  t.stages = {"fwd_h"};
  t.summary = "The state scan of all segments at once, from the states that enter them.";
  t.arguments = scan::joined(
      scan::kInputs,
      {
          {"segment_state", Access::in, "fp32", {"NS", "HV", "K", "V"}, ""},
          {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
          {"chunk_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
          {"h", Access::out, "DTYPE", {"NT", "HV", "K", "V"}, ""},
          {"v_new", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
          {"final_state", Access::out, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"},
           "FINAL_STATE"},
      });
  t.constants = scan::joined(scan::kConstants, {"FINAL_STATE", "STATE_V_FIRST", "KEEP_STATES"});
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), scan::kForward, scan::Walk::segment);
}

}  // namespace wyvern::fwd_h_resume
