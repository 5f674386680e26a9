#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/device/cuda/part_sums_layout.hpp"
#include "templates/gate/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::gate_param_sum {
namespace {

/// What every variant shares. BT says how many chunk slots there are, and nothing else.
Template stage() {
  Template t;
  t.name = "gate_param_sum";
  t.covers = {stages::gate_param_sum};
  t.constants = {constant::HAS_A_LOG, constant::HAS_DT_BIAS, constant::GATE_K};
  return t;
}

/// Blocks of BC columns of both outputs.
std::int64_t tiles(const Spec& s) {
  const std::int64_t BC = s.BC;
  return (s.HAS_A_LOG ? cuda::ceil_div(s.HV, BC) : 0) +
         (s.HAS_DT_BIAS ? cuda::ceil_div(s.GATE_HEADS, BC) : 0);
}

/// CUDA, sm_80 and up: one block BC columns and all chunk slots.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16, 128})},
                {tunable::BC, cuda::integers({32, 8})},
                {tunable::num_warps, cuda::integers({16, 8, 32, 4})}};
  t.source = "portable.cu";
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  // Few columns, as of a scalar gate, have narrow blocks, so that there are more of them.
  t.fallback = [](Spec& s, const Limits&) {
    const std::int64_t BC = s.GATE_HEADS >= 1024 ? 32 : 8;
    s.BC = BC;
    s.num_warps = 16;
  };
  t.geometry = [](const Spec& s, const Extents&, const Limits&) {
    return Geometry{{tiles(s), 1, 1}, s.num_warps * 32, cuda::PartSumsLayout(s).bytes};
  };
  return t;
}

/// One call: BC columns and all chunk slots.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BT, kCpuChunkSizes}, {tunable::BC, {64, 256}}};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec& s, const Limits&) { s.BC = 64; };
  t.geometry = [](const Spec& s, const Extents&, const Limits&) {
    return Geometry{.grid = {tiles(s), 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::gate_param_sum
