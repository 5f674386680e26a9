#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/gradient/bwd_dv_local/cpu_layout.hpp"
#include "templates/gradient/bwd_dv_local/layout.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/output/chunk_columns_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::bwd_dv_local {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dv_local";
  t.covers = {stages::bwd_dv_local};
  t.constants = {constant::DTYPE,       constant::K,         constant::V,         constant::VARLEN,
                 constant::SCALAR_GATE, constant::QK_L2NORM, constant::STATE_UNIT};
  t.strided = {"q", "k", "do"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

}  // namespace

std::vector<Template> contract() {
  return {chunk_columns::portable(stage(), {64, 32, 16, 128}, shared_bytes),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BV, value_columns,
                                constant::H)};
}

}  // namespace wyvern::bwd_dv_local
