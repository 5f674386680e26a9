#include "templates/reverse_scan_contract.hpp"

namespace wyvern::bwd_dhu_resume {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu_resume";
  t.stages = {"bwd_dhu"};
  t.summary = "The reverse state scan of all segments at once, from the gradients at their ends.";
  const Argument start{"segment_dstate", Access::in, "fp32", {"NS", "HV", "K", "V"}, ""};
  t.arguments = scan::joined(scan::joined(reverse_scan::kInputs, {start}), reverse_scan::kOutputs);
  t.constants = scan::joined(reverse_scan::kConstants, {"INITIAL_STATE", "STATE_V_FIRST"});
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), reverse_scan::kReverse, scan::Walk::segment);
}

}  // namespace wyvern::bwd_dhu_resume
