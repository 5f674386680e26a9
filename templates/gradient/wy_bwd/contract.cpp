#include "templates/cpu_contract.hpp"
#include "templates/gradient/backward_contract.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/gradient/wy_bwd/cpu_layout.hpp"

namespace wyvern::wy_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "wy_bwd";
  t.covers = {stages::wy_bwd};
  t.constants = {constant::DTYPE,        constant::BETA_DTYPE,  constant::H,
                 constant::HV,           constant::K,           constant::V,
                 constant::VARLEN,       constant::SCALAR_GATE, constant::QK_L2NORM,
                 constant::BETA_SIGMOID, constant::NEG_EIGVAL};
  return t;
}

std::int64_t shared_bytes(const Spec& s) {
  const backward::Sizes size(s);
  return std::max(s.num_stages * 2 * size.keys, size.values) + 2 * size.values + 2 * size.square +
         size.column + size.warp_rows + size.columns + 2 * size.row_sums;
}

}  // namespace

std::vector<Template> contract() {
  return {backward::portable(stage(), shared_bytes),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BK, columns_of_K)};
}

}  // namespace wyvern::wy_bwd
