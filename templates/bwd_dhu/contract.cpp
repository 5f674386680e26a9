#include "templates/reverse_scan_contract.hpp"

namespace wyvern::bwd_dhu {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu";
  t.stages = {"bwd_dhu_segment", "bwd_dhu_combine", "bwd_dhu"};
  t.summary = "The reverse state scan: the gradient of every chunk's leaving state, and dU.";
  const Argument start{
      "dht", Access::in, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"}, "FINAL_STATE"};
  t.arguments = scan::joined(scan::joined(reverse_scan::kInputs, {start}), reverse_scan::kOutputs);
  t.constants =
      scan::joined(reverse_scan::kConstants, {"INITIAL_STATE", "FINAL_STATE", "STATE_V_FIRST"});
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), reverse_scan::kReverse, scan::Walk::sequence);
}

}  // namespace wyvern::bwd_dhu
