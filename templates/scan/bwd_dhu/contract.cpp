#include "templates/scan/reverse_scan_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::bwd_dhu {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu";
  t.covers = {stages::bwd_dhu_segment, stages::bwd_dhu_combine, stages::bwd_dhu};
  t.summary = "The reverse state scan: the gradient of every chunk's leaving state, and dU.";
  t.constants =
      scan::joined(reverse_scan::kConstants,
                   {constant::INITIAL_STATE, constant::FINAL_STATE, constant::STATE_V_FIRST});
  t.strided = {"q", "k", "do"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::templates(stage(), reverse_scan::kReverse, scan::Scope::sequence);
}

}  // namespace wyvern::bwd_dhu
