#include "templates/scan/scan_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::fwd_h_segment {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h_segment";
  t.covers = {stages::fwd_h_segment};
  t.constants = scan::joined(scan::kConstants, {constant::SUMMARY});
  t.strided = {"k"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), scan::kForward, scan::Scope::segment_map);
}

}  // namespace wyvern::fwd_h_segment
