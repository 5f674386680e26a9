#include "templates/cuda_contract.hpp"
#include "templates/steps/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::step_seqlens {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "step_seqlens";
  t.covers = {stages::step_seqlens};
  t.constants = {constant::SEQLENS_DTYPE, constant::STEPS};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  return t;
}

/// CUDA, sm_80 and up: a thread a boundary.
Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::num_warps, cuda::integers({4, 8})}};
  t.source = "portable.cu";
  t.fallback = [](Spec& s, const Limits&) { s.num_warps = 4; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return cuda::launch(cuda::ceil_div(e.N + 1, s.num_warps * 32), s, 0);
  };
  return t;
}

/// One call: ROWS boundaries.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::ROWS, {256, 64}}};
  t.fallback = [](Spec& s, const Limits&) { s.ROWS = 256; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {(e.N + s.ROWS) / s.ROWS, 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::step_seqlens
