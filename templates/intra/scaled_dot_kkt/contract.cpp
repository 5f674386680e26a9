#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/intra/scaled_dot_kkt/cpu_layout.hpp"
#include "templates/intra/scaled_dot_kkt/hopper_layout.hpp"
#include "templates/intra/scaled_dot_kkt/layout.hpp"
#include "templates/intra/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::scaled_dot_kkt {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "scaled_dot_kkt";
  t.covers = {stages::scaled_dot_kkt};
  t.constants = {constant::DTYPE,        constant::BETA_DTYPE,  constant::K,
                 constant::VARLEN,       constant::SCALAR_GATE, constant::QK_L2NORM,
                 constant::BETA_SIGMOID, constant::NEG_EIGVAL,  constant::KEEP_STATES};
  t.strided = {"k", "beta"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

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
  // More do not fit into registers; in fp32, where a step is many instructions, compiling them
  // takes up to minutes.
  const std::int64_t accumulators = cuda::ceil_div(s.BT / 16, s.num_warps) * (s.BT / 2);
  if (accumulators > (cuda::is_half(s) ? cuda::kMaxAccumulators : 64))
    return fmt::format("num_warps={} keeps too much of the product in each thread", s.num_warps);
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

/// k [tokens, H, K] as panels of 64 columns, whose rows fill the swizzle's 128 bytes; one TMA load
/// has all panels of a chunk's rows of one head.
TiledView panels_of_k(const Spec& s, const Extents& e) {
  const auto size = static_cast<std::int64_t>(size_of(s.DTYPE));
  const std::int64_t panels = s.K / 64;
  return {.dims = {64, e.B * e.T, panels, s.H},
          .strides = {s.H * s.K * size, 64 * size, s.K * size},
          .box = {64, s.BT, panels, 1},
          .swizzle = Swizzle::bytes128};
}

std::string hopper_illegal(const Spec& s, const Limits& limits) {
  if (s.BT != 64) return fmt::format("BT={} is not the 64 rows of a warpgroup's product", s.BT);
  if (!cuda::is_half(s)) return "wgmma has no fp32 products";
  if (s.K % 64 != 0) return fmt::format("K={} is not a multiple of 64", s.K);
  return cuda::exceeds_shared(HopperLayout(s).bytes, limits);
}

/// Hopper: one block, one warpgroup, a chunk and key head.
Template hopper() {
  Template t = stage();
  t.variant = "hopper";
  t.source = "hopper.cu";
  t.needs.wgmma = t.needs.tensor_copies = true;
  t.tunables = {{tunable::BT, cuda::integers({64})}};
  t.tensor_maps = {{.name = "k_map", .argument = "k", .view = panels_of_k}};
  t.illegal = hopper_illegal;
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{
        .grid = {e.NT * s.H, 1, 1}, .threads = 128, .shared_bytes = HopperLayout(s).bytes};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(), hopper(), cpu_chunks(stage(), scratch_bytes<ScratchLayout>, constant::H)};
}

}  // namespace wyvern::scaled_dot_kkt
