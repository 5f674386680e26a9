#include "templates/scan_contract.hpp"

namespace wyvern::fwd_h_resume {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h_resume";
  t.stages = {"fwd_h"};
  t.summary = "The state scan of all segments at once, from the states that enter them.";
  const Argument start{"segment_state", Access::in, "fp32", {"NS", "HV", "K", "V"}, ""};
  t.arguments = scan::joined(scan::joined(scan::kInputs, {start}), scan::kOutputs);
  t.constants = scan::joined(scan::kConstants, {"FINAL_STATE", "STATE_V_FIRST", "KEEP_STATES"});
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), scan::kForward, scan::Walk::segment);
}

}  // namespace wyvern::fwd_h_resume
