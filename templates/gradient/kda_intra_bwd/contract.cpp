#include "templates/cpu_contract.hpp"
#include "templates/gradient/kda_backward_contract.hpp"
#include "templates/gradient/kda_intra_bwd/cpu_layout.hpp"
#include "templates/gradient/kda_intra_bwd/layout.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_intra_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_intra_bwd";
  t.covers = {stages::kda_intra_bwd};
  t.constants = {constant::DTYPE,        constant::BETA_DTYPE, constant::K,
                 constant::VARLEN,       constant::SAFE_GATE,  constant::QK_L2NORM,
                 constant::BETA_SIGMOID, constant::NEG_EIGVAL};
  t.strided = {"q", "k", "beta", "erase"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

std::string illegal(const Spec& s, const Limits& limits) {
  for (std::string reason :
       {cuda::exceeds_dimension("BK", s.BK, "K", s.K), kda_backward::uneven_warps(s)})
    if (!reason.empty()) return reason;
  return cuda::exceeds_shared(shared_bytes(s), limits);
}

/// CUDA, sm_80 and up: one block a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16, 128})},
                {tunable::BK, cuda::integers({32, 64, 128})},
                {tunable::num_warps, cuda::integers({4, 8, 2, 1})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](Spec& s, const Limits&) {
    s.BK = 32;
    s.num_warps = s.BT / 16;
    s.precision = cuda::default_precision(s);
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BK, key_columns)};
}

}  // namespace wyvern::kda_intra_bwd
