#include "templates/scan_contract.hpp"

namespace wyvern::fwd_h_segment {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h_segment";
  t.stages = {"fwd_h_segment"};
  t.summary = "What each segment but a sequence's last does to a state: S -> M S + R.";
  t.arguments = scan::joined(scan::kInputs,
                             {
                                 {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
                                 {"segment_M", Access::out, "fp32", {"NS", "HV", "K", "K"}, ""},
                                 {"segment_R", Access::out, "fp32", {"NS", "HV", "K", "V"}, ""},
                             });
  t.constants = scan::kConstants;
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), scan::kForward, scan::Walk::effect);
}

}  // namespace wyvern::fwd_h_segment
