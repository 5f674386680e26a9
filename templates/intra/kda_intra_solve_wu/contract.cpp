#include "templates/cpu_contract.hpp"
#include "templates/intra/intra_contract.hpp"
#include "templates/intra/kda_intra_solve_wu/cpu_layout.hpp"
#include "templates/intra/kda_intra_solve_wu/layout.hpp"
#include "templates/intra/stages.hpp"

namespace wyvern::kda_intra_solve_wu {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_intra_solve_wu";
  t.covers = {stages::kda_intra, stages::solve_tril, stages::kda_recompute_w_u};
  t.keeps = {{"Tinv", {constant::KEEP_INVERSE}}};
  t.summary = "Aqk, W, U, qg and kg from q, k, v, rates and Gk: A and its inverse stay on chip.";
  t.constants = {constant::DTYPE,        constant::U_DTYPE,    constant::STATE_UNIT,
                 constant::BETA_DTYPE,   constant::K,          constant::V,
                 constant::VARLEN,       constant::SAFE_GATE,  constant::QK_L2NORM,
                 constant::BETA_SIGMOID, constant::NEG_EIGVAL, constant::KEEP_INVERSE};
  t.strided = {"q", "k", "v", "beta", "erase", "write"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

}  // namespace

std::vector<Template> contract() {
  return {intra::fused(stage(), shared_bytes),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BV, value_columns)};
}

}  // namespace wyvern::kda_intra_solve_wu
