#include "templates/scan_contract.hpp"

namespace wyvern::fwd_h {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h";
  t.stages = {"fwd_h_segment", "fwd_h_combine", "fwd_h"};
  t.summary = "The state scan: every chunk's entering state, V' = U - W S, and the final state.";
  const Argument start{"initial_state",
                       Access::in,
                       "STATE_DTYPE",
                       {"N", "HV", "STATE_ROWS", "STATE_COLS"},
                       "INITIAL_STATE"};
  t.arguments = scan::joined(scan::joined(scan::kInputs, {start}), scan::kOutputs);
  t.constants = scan::joined(scan::kConstants, {"STATE_DTYPE", "INITIAL_STATE", "FINAL_STATE",
                                                "STATE_V_FIRST", "KEEP_STATES"});
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), scan::kForward, scan::Walk::sequence);
}

}  // namespace wyvern::fwd_h
