#include "templates/scan/reverse_scan_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::bwd_dhu_segment {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu_segment";
  t.covers = {stages::bwd_dhu_segment};
  t.constants = scan::joined(reverse_scan::kConstants, {constant::SUMMARY});
  t.strided = {"q", "k", "do"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), reverse_scan::kReverse, scan::Scope::segment_map);
}

}  // namespace wyvern::bwd_dhu_segment
