#include <algorithm>
#include "templates/cpu_contract.hpp"
#include "templates/intra/solve_tril/cpu_layout.hpp"
#include "templates/intra/stages.hpp"

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/intra/solve_tril/layout.hpp"
#include "templates/intra/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::solve_tril {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "solve_tril";
  t.covers = {stages::solve_tril};
  t.constants = {constant::DTYPE};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// CUDA, sm_80 and up: one block a chunk and value head, the inverse in fp32 in shared memory.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16, 128})},
                {tunable::num_warps, cuda::integers({2, 1, 4})},
                {tunable::precision, cuda::kPrecisionValues}};
  t.source = "portable.cu";
  t.illegal = [](const Spec& s, const Limits& limits) {
    const std::int64_t BT = s.BT;
    if (s.num_warps * 32 < BT)
      return fmt::format("num_warps={} is less than BT/32={}", s.num_warps, BT / 32);
    if (BT == 128 && s.precision == Precision::tf32 && !cuda::is_half(s))
      return std::string("precision=tf32 at BT=128 reaches 1e-3, the bound of fp32 results");
    return cuda::exceeds_shared(shared_bytes(s), limits);
  };
  t.redundant = [](const Spec& s) { return s.BT == 16 && s.precision != Precision::ieee; };
  t.fallback = [](Spec& s, const Limits&) {
    s.num_warps = std::max<std::int64_t>(s.BT / 32, 1);
    s.precision = s.BT == 16         ? Precision::ieee
                  : cuda::is_half(s) ? Precision::tf32
                                     : Precision::tf32x3;
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(), cpu_chunks(stage(), scratch_bytes<ScratchLayout>)};
}

}  // namespace wyvern::solve_tril
