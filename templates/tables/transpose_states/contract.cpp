#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/tables/stages.hpp"
#include "templates/tables/transpose_states/layout.hpp"
#include "templates/template.hpp"

namespace wyvern::transpose_states {
namespace {

/// What every variant shares. BT says how many chunk slots there are, and nothing else.
Template stage() {
  Template t;
  t.name = "transpose_states";
  t.covers = {stages::transpose_states};
  t.constants = {constant::DTYPE, constant::K, constant::V};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  return t;
}

/// CUDA, sm_80 and up: one block a square of a state.
Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16, 128})},
                {tunable::num_warps, cuda::integers({8, 4})}};
  t.source = "portable.cu";
  t.fallback = [](Spec& s, const Limits&) { s.num_warps = 8; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t squares = cuda::ceil_div(s.K, kSquare) * cuda::ceil_div(s.V, kSquare);
    return cuda::launch(e.NT * s.HV * squares, s, SharedLayout(s).bytes);
  };
  return t;
}

/// One call: a state.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BT, kCpuChunkSizes}};
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {s.HV, e.NT, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::transpose_states
