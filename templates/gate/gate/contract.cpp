#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/gate/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::gate {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gate";
  t.covers = {stages::gate};
  t.constants = {constant::G_DTYPE, constant::HAS_DT_BIAS, constant::HV};
  t.strided = {"g"};
  return t;
}

/// CUDA, sm_80 and up: four elements a thread.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{tunable::num_warps, cuda::integers({4, 8})}};
  t.source = "portable.cu";
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec& s, const Limits&) { s.num_warps = 4; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t threads = s.num_warps * 32;
    const std::int64_t count = e.B * e.T * s.HV;
    return Geometry{{cuda::ceil_div(count, threads * 4), 1, 1}, threads, 0};
  };
  return t;
}

/// One call: ROWS tokens, all heads.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::ROWS, {256, 64}}};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec& s, const Limits&) { s.ROWS = 256; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t rows = s.ROWS;
    return Geometry{.grid = {(e.B * e.T + rows - 1) / rows, 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::gate
