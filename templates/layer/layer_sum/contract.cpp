#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/device/cuda/part_sums_layout.hpp"
#include "templates/layer/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::layer_sum {
namespace {

/// What both variants share.
Template stage() {
  Template t;
  t.name = "layer_sum";
  t.covers = {stages::layer_sum};
  t.constants = {constant::V};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  return t;
}

/// CUDA, sm_80 and up: one block BC columns and all parts.
Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::BC, cuda::integers({8, 32})},
                {tunable::num_warps, cuda::integers({16, 8, 32})}};
  t.source = "portable.cu";
  // There are few columns: narrow blocks make more of them.
  t.fallback = [](Spec& s, const Limits&) { s.BC = 8, s.num_warps = 16; };
  t.geometry = [](const Spec& s, const Extents&, const Limits&) {
    return Geometry{
        {cuda::ceil_div(s.V, s.BC), 1, 1}, s.num_warps * 32, cuda::PartSumsLayout(s).bytes};
  };
  return t;
}

/// One call: BC columns and all parts.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BC, {64, 256}}};
  t.fallback = [](Spec& s, const Limits&) { s.BC = 64; };
  t.geometry = [](const Spec& s, const Extents&, const Limits&) {
    return Geometry{.grid = {cuda::ceil_div(s.V, s.BC), 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::layer_sum
