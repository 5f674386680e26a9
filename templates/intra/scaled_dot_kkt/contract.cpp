#include <algorithm>
#include "templates/cpu_contract.hpp"
#include "templates/intra/scaled_dot_kkt/cpu_layout.hpp"
#include "templates/intra/stages.hpp"

#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::scaled_dot_kkt {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "scaled_dot_kkt";
  t.covers = {stages::scaled_dot_kkt};
  t.constants = {constant::DTYPE,       constant::BETA_DTYPE, constant::H,
                 constant::HV,          constant::K,          constant::VARLEN,
                 constant::SCALAR_GATE, constant::QK_L2NORM,  constant::BETA_SIGMOID,
                 constant::NEG_EIGVAL};
  return t;
}

std::int64_t shared_bytes(const Spec& s) {
  const std::int64_t BT = s.BT;
  return s.num_stages * cuda::tile_bytes(BT, s.BK, s.DTYPE) +
         (s.QK_L2NORM ? 3 : 2) * cuda::column_bytes(BT);
}

std::string illegal(const Spec& s, const Limits& limits) {
  const std::int64_t K = s.K;
  const std::int64_t BK = s.BK;
  const std::int64_t stages = s.num_stages;
  if (std::string reason = cuda::exceeds_dimension("BK", BK, "K", K); !reason.empty())
    return reason;
  if (stages > cuda::ceil_div(K, BK))
    return fmt::format("num_stages={} is more than the {} tiles of K", stages,
                       cuda::ceil_div(K, BK));
  if (s.num_warps * 16 > s.BT)
    return fmt::format("num_warps={} is more than BT/16={}", s.num_warps, s.BT / 16);
  return cuda::exceeds_shared(shared_bytes(s), limits);
}

/// CUDA, sm_80 and up: one block a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16, 128})},
                {tunable::BK, cuda::integers({64, 128, 32})},
                {tunable::num_warps, cuda::integers({4, 2, 1, 8})},
                {tunable::num_stages, cuda::integers({2, 1})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](Spec& s, const Limits&) {
    s.BK = s.K > 32 ? 64 : 32;
    s.num_warps = std::min<std::int64_t>(s.BT / 16, 4);
    s.num_stages = s.K > 64 ? 2 : 1;
    s.precision = cuda::default_precision(s);
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(), cpu_chunks(stage(), scratch_bytes<ScratchLayout>, constant::H)};
}

}  // namespace wyvern::scaled_dot_kkt
