#include "templates/gdn2/gdn2_intra_solve_wu/layout.hpp"
#include "templates/gdn2/stages.hpp"
#include "templates/intra/intra_contract.hpp"
#include "templates/intra/stages.hpp"

namespace wyvern::gdn2_intra_solve_wu {
namespace {

Template stage() {
  Template t;
  t.name = "gdn2_intra_solve_wu";
  t.covers = {stages::gdn2_intra, stages::solve_tril, stages::gdn2_recompute_w_u};
  t.keeps = {{"Tinv", {constant::KEEP_INVERSE}}};
  t.summary =
      "Aqk, W, U, qg and kg from q, k, v, erase, write and Gk: A and its inverse stay on chip.";
  t.constants = {constant::DTYPE,     constant::U_DTYPE,   constant::BETA_DTYPE,
                 constant::K,         constant::V,         constant::VARLEN,
                 constant::SAFE_GATE, constant::QK_L2NORM, constant::KEEP_INVERSE};
  t.strided = {"q", "k", "v", "erase", "write"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

}  // namespace

std::vector<Template> contract() { return {intra::fused(stage(), shared_bytes)}; }

}  // namespace wyvern::gdn2_intra_solve_wu
