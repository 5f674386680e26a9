#include "templates/scan/combine_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::bwd_dhu_combine {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu_combine";
  t.covers = {stages::bwd_dhu_combine};
  t.constants = {constant::DTYPE,  constant::K,           constant::V,
                 constant::VARLEN, constant::FINAL_STATE, constant::STATE_V_FIRST};
  return t;
}

}  // namespace

std::vector<Template> contract() { return {combine::portable(stage()), combine::cpu(stage())}; }

}  // namespace wyvern::bwd_dhu_combine
