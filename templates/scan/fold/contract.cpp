#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/scan/fold/cpu_layout.hpp"
#include "templates/scan/fold/layout.hpp"
#include "templates/scan/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::fold {
namespace {

/// What every variant shares. Sums have one order, whatever the config.
Template stage() {
  Template t;
  t.name = "fold";
  t.covers = {stages::fold};
  t.constants = {constant::K, constant::V, constant::TRANSITION, constant::BACKWARDS,
                 constant::SUMMARY_COLUMNS};
  return t;
}

/// CUDA, sm_80 and up: one block BV columns of a value head, for all ranges.
Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::BV, cuda::integers({16, 32})},
                {tunable::num_warps, cuda::integers({8, 4})}};
  t.source = "portable.cu";
  t.illegal = [](const Spec& s, const Limits& limits) {
    if (s.BV > 16 && s.BV / 2 >= s.V)
      return fmt::format("BV={} is wider than {} columns need", s.BV, s.V);
    // Twice as many spilled a kilobyte a thread on sm_80.
    if (SharedLayout(s).rows > 8)
      return fmt::format("num_warps={} keeps too much of the state in each thread", s.num_warps);
    return cuda::exceeds_shared(SharedLayout(s).bytes, limits);
  };
  t.redundant = [](const Spec&) { return false; };
  t.fallback = [](Spec& s, const Limits&) {
    s.BV = 16;
    s.num_warps = 8;
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t tiles = cuda::ceil_div(s.V, s.BV);
    return cuda::launch(e.N == 0 ? 0 : s.HV * tiles, s, SharedLayout(s).bytes);
  };
  return t;
}

/// One call: the same.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BV, {64, 128, 32}}};
  t.illegal = [](const Spec& s, const Limits& limits) {
    const std::string problem = column_block_problem("BV", s.BV, s.V);
    return problem.empty() ? scratch_problem(scratch_bytes<ScratchLayout>(s), limits) : problem;
  };
  t.redundant = [](const Spec&) { return false; };
  t.fallback = [](Spec& s, const Limits&) { s.BV = column_block(s.V, 64); };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {cuda::ceil_div(s.V, s.BV), s.HV, e.N == 0 ? 0 : 1},
                    .shared_bytes = scratch_bytes<ScratchLayout>(s)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::fold
