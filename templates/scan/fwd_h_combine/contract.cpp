#include "templates/pool_contract.hpp"
#include "templates/scan/combine_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::fwd_h_combine {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h_combine";
  t.covers = {stages::fwd_h_combine};
  t.constants = pool::with_slots(
      {constant::DTYPE, constant::K, constant::V, constant::VARLEN, constant::STATE_V_FIRST});
  t.strided = {"state"};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {combine::portable(stage()), combine::cpu(stage())}; }

}  // namespace wyvern::fwd_h_combine
