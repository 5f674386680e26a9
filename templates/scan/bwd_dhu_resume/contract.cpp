#include "templates/scan/reverse_scan_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::bwd_dhu_resume {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu_resume";
  t.covers = {stages::bwd_dhu};
  t.constants =
      scan::joined(reverse_scan::kConstants, {constant::INITIAL_STATE, constant::STATE_V_FIRST});
  t.strided = {"q", "k", "do"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), reverse_scan::kReverse, scan::Scope::segment);
}

}  // namespace wyvern::bwd_dhu_resume
