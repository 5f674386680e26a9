#include "templates/pool_contract.hpp"
#include "templates/scan/scan_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::fwd_h_resume {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h_resume";
  t.covers = {stages::fwd_h};
  t.constants =
      scan::joined(pool::with_checkpoints(pool::with_final_slots(scan::kConstants)),
                   {constant::FINAL_STATE, constant::STATE_V_FIRST, constant::KEEP_STATES});
  t.strided = {"k", "state"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return scan::with_checkpoints(scan::templates(stage(), scan::kForward, scan::Scope::segment));
}

}  // namespace wyvern::fwd_h_resume
