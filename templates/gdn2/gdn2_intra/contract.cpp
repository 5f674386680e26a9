#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/gdn2/gdn2_intra/cpu_layout.hpp"
#include "templates/gdn2/gdn2_intra/layout.hpp"
#include "templates/gdn2/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::gdn2_intra {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gdn2_intra";
  t.covers = {stages::gdn2_intra};
  t.constants = {constant::DTYPE, constant::BETA_DTYPE, constant::H,         constant::HV,
                 constant::K,     constant::VARLEN,     constant::SAFE_GATE, constant::QK_L2NORM};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

std::string illegal(const Spec& s, const Limits& limits) {
  const std::int64_t K = s.K, BT = s.BT, BK = s.BK;
  const std::int64_t warps = s.num_warps, buffers = s.num_stages;
  if (std::string reason = cuda::exceeds_dimension("BK", BK, "K", K); !reason.empty())
    return reason;
  if (buffers > cuda::ceil_div(K, BK))
    return fmt::format("num_stages={} is more than the {} tiles of K", buffers,
                       cuda::ceil_div(K, BK));
  if (warps < BT / 16 || warps > BT / 4)
    return fmt::format("num_warps={} is not between BT/16={} and BT/4={}", warps, BT / 16, BT / 4);
  return cuda::exceeds_shared(shared_bytes(s), limits);
}

/// CUDA, sm_80 and up: one block a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16})},
                {tunable::BK, cuda::integers({64, 128, 32})},
                {tunable::num_warps, cuda::integers({4, 8, 2, 1})},
                {tunable::num_stages, cuda::integers({2, 1})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = illegal;
  t.fallback = [](Spec& s, const Limits&) {
    const bool half = cuda::is_half(s);
    s.BK = s.K > 32 ? 64 : 32;
    s.num_warps = std::max<std::int64_t>(s.BT / 16, 2);
    s.num_stages = s.K > 64 && half ? 2 : 1;
    s.precision = half ? Precision::tf32 : Precision::tf32x3;
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(), cpu_chunks(stage(), scratch_bytes<ScratchLayout>)};
}

}  // namespace wyvern::gdn2_intra
