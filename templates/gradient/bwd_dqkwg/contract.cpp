#include "templates/cpu_contract.hpp"
#include "templates/gradient/backward_contract.hpp"
#include "templates/gradient/bwd_dqkwg/cpu_layout.hpp"
#include "templates/gradient/bwd_dqkwg/layout.hpp"
#include "templates/gradient/stages.hpp"

namespace wyvern::bwd_dqkwg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dqkwg";
  t.covers = {stages::bwd_dqkwg};
  t.constants = {constant::DTYPE,       constant::K,         constant::V,    constant::VARLEN,
                 constant::SCALAR_GATE, constant::QK_L2NORM, constant::STEPS};
  t.strided = {"q", "k", "do"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// On an H200 with chunks of 64 tokens 630 us instead of 721 with half the columns, of 32 571
/// instead of 634.
backward::Division fastest(const Spec& s) { return {64, s.BT >= 32 ? 4 : 2}; }

}  // namespace

std::vector<Template> contract() {
  return {backward::portable(stage(), shared_bytes, fastest),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BK, key_columns)};
}

}  // namespace wyvern::bwd_dqkwg
