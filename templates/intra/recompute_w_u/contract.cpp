#include "templates/cpu_contract.hpp"
#include "templates/intra/intra_contract.hpp"
#include "templates/intra/recompute_w_u/cpu_layout.hpp"
#include "templates/intra/recompute_w_u/layout.hpp"
#include "templates/intra/stages.hpp"

namespace wyvern::recompute_w_u {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "recompute_w_u";
  t.covers = {stages::recompute_w_u};
  t.constants = {constant::DTYPE,        constant::U_DTYPE,     constant::STATE_UNIT,
                 constant::BETA_DTYPE,   constant::K,           constant::V,
                 constant::VARLEN,       constant::SCALAR_GATE, constant::QK_L2NORM,
                 constant::BETA_SIGMOID, constant::NEG_EIGVAL,  constant::KEEP_STATES};
  t.strided = {"k", "v", "beta"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

}  // namespace

std::vector<Template> contract() {
  return {intra::from_inverse(stage(), shared_bytes),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BV, all_columns)};
}

}  // namespace wyvern::recompute_w_u
