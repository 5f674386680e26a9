#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
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
  t.constants = {constant::DTYPE, constant::HV, constant::VARLEN};
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

/// Scratch of one block, as solve_tril/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Spec& s) {
  const std::int64_t BT = s.BT;
  return fp32_bytes(2 * scratch::tile(BT, BT) + scratch::tile(16, BT));
}

/// One call: a chunk, one value head.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BT, {64, 32, 16}}};
  t.illegal = [](const Spec& s, const Limits& limits) {
    return scratch_problem(cpu_scratch(s), limits);
  };
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {s.HV, e.NT, 1}, .shared_bytes = cpu_scratch(s)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::solve_tril
