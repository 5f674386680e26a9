#include "templates/cpu_contract.hpp"
#include "templates/gradient/kda_backward_contract.hpp"
#include "templates/gradient/kda_wy_dqkg/cpu_layout.hpp"
#include "templates/gradient/kda_wy_dqkg/layout.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_wy_dqkg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_wy_dqkg";
  t.covers = {stages::kda_bwd_dqkg, stages::kda_intra_bwd};
  t.summary = "KDA: dq, dk, dv, dbeta (derase, dwrite) and dGk of a chunk at once.";
  t.constants = {constant::DTYPE,     constant::BETA_DTYPE,   constant::K,
                 constant::V,         constant::VARLEN,       constant::SAFE_GATE,
                 constant::QK_L2NORM, constant::BETA_SIGMOID, constant::NEG_EIGVAL};
  t.strided = {"q", "k", "v", "beta", "erase", "write", "do"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// kda_backward's, with a minimum of blocks a multiprocessor.
Template portable() {
  Template t = kda_backward::portable(stage(), shared_bytes);
  t.tunables.insert(t.tunables.end() - 1, {tunable::min_blocks, cuda::integers({0, 2, 4})});
  t.illegal = [rest = t.illegal](const Spec& s, const Limits& limits) {
    const std::string reason = rest(s, limits);
    return reason.empty() ? cuda::min_blocks_problem(s, shared_bytes(s), limits) : reason;
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BK, key_columns)};
}

}  // namespace wyvern::kda_wy_dqkg
