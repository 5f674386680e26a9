#include "templates/scan/combine_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::bwd_dhu_summary {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu_summary";
  t.covers = {stages::bwd_dhu_summary};
  t.constants = {constant::DTYPE,  constant::K,           constant::V,
                 constant::VARLEN, constant::FINAL_STATE, constant::STATE_V_FIRST,
                 constant::SUMMARY};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return combine::summaries(stage(), [](const Spec& s) { return cuda::ceil_div(s.V, s.BV); });
}

}  // namespace wyvern::bwd_dhu_summary
