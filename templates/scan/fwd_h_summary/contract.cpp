#include "templates/scan/combine_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::fwd_h_summary {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h_summary";
  t.covers = {stages::fwd_h_summary};
  t.constants = {constant::DTYPE,         constant::K,          constant::V,
                 constant::VARLEN,        constant::TRANSITION, constant::SUMMARY_COLUMNS,
                 constant::STATE_V_FIRST, constant::SUMMARY};
  return t;
}

/// Blocks of a value head: BV columns of R, or of M.
std::int64_t tiles(const Spec& s) {
  return cuda::ceil_div(s.V, s.BV) + (s.TRANSITION ? cuda::ceil_div(s.K, s.BV) : 0);
}

}  // namespace

std::vector<Template> contract() { return combine::summaries(stage(), tiles); }

}  // namespace wyvern::fwd_h_summary
