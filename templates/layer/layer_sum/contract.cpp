#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/layer/layout.hpp"
#include "templates/layer/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::layer_sum {
namespace {

/// What both variants share.
Template stage() {
  Template t;
  t.name = "layer_sum";
  t.covers = {stages::layer_sum};
  t.constants = {constant::V, constant::K, constant::STEPS, constant::CONV_WIDTH};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  return t;
}

/// Blocks for the columns of all sums, so many of norm_weight and of the others a block.
std::int64_t tiles(const Spec& s, std::int64_t columns, std::int64_t conv_columns) {
  return (s.OUTPUT_NORM ? cuda::ceil_div(s.V, columns) : 0) +
         (s.SHORT_CONV ? cuda::ceil_div(s.CONV_CHANNELS * s.CONV_WIDTH, conv_columns) : 0) +
         (s.HAS_CONV_BIAS ? cuda::ceil_div(s.CONV_CHANNELS, conv_columns) : 0);
}

/// CUDA, sm_80 and up: one block a few columns and all parts.
Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::BC, cuda::integers({8, 32})},
                {tunable::num_warps, cuda::integers({16, 8, 32})}};
  t.source = "portable.cu";
  // There are few columns of norm_weight: narrow blocks make more of them.
  t.fallback = [](Spec& s, const Limits&) { s.BC = 8, s.num_warps = 16; };
  t.geometry = [](const Spec& s, const Extents&, const Limits&) {
    return Geometry{{tiles(s, s.BC, kConvSumColumns), 1, 1}, s.num_warps * 32, shared_bytes(s)};
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
    return Geometry{.grid = {tiles(s, s.BC, s.BC), 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::layer_sum
