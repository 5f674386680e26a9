#include "templates/reverse_scan_contract.hpp"

namespace wyvern::bwd_dhu_segment {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu_segment";
  t.stages = {"bwd_dhu_segment"};
  t.summary = "What each segment but a first one does to a state's gradient: dS -> dM dS + dR.";
  t.arguments = scan::joined(reverse_scan::kInputs,
                             {
                                 {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
                                 {"segment_dM", Access::out, "fp32", {"NS", "HV", "K", "K"}, ""},
                                 {"segment_dR", Access::out, "fp32", {"NS", "HV", "K", "V"}, ""},
                             });
  t.constants = reverse_scan::kConstants;
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), reverse_scan::kReverse, scan::Walk::effect);
}

}  // namespace wyvern::bwd_dhu_segment
