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

}  // namespace

std::vector<Template> contract() {
  return {backward::portable(stage(), shared_bytes),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BK, key_columns)};
}

}  // namespace wyvern::bwd_dqkwg
