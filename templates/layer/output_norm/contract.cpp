#include <fmt/format.h>

#include "templates/layer/stages.hpp"
#include "templates/rows/rows_contract.hpp"

namespace wyvern::output_norm {
namespace {

/// What both variants share.
Template stage() {
  Template t;
  t.name = "output_norm";
  t.covers = {stages::output_norm};
  t.constants = {constant::DTYPE, constant::V, constant::NORM_SILU};
  t.strided = {"norm_gate", "o"};
  return t;
}

rows::Lanes lanes_of(const Spec& s) { return rows::lanes_of_row(s.V, s.DTYPE); }

/// CUDA, sm_80 and up: a few lanes of a warp a row, BC rows at once.
Template portable(Template t) {
  constexpr std::int64_t kMostVectors = 4;  // of a lane in registers, of o and of the gate each
  t.variant = "portable";
  t.tunables = {{tunable::num_warps, cuda::integers({8, 4, 16})},
                {tunable::BC, cuda::integers({2, 4, 1})}};
  t.source = "portable.cu";
  t.illegal = [](const Spec& s, const Limits&) {
    const std::int64_t vectors = lanes_of(s).vectors;
    if (s.BC == 1 || s.BC * vectors <= kMostVectors) return std::string();
    return fmt::format("BC={} rows of {} vectors a lane are too many for registers", s.BC, vectors);
  };
  t.fallback = [](Spec& s, const Limits&) {
    s.num_warps = 8;
    s.BC = lanes_of(s).vectors == 1 ? 2 : 1;
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t threads = s.num_warps * 32;
    const std::int64_t rows = threads / lanes_of(s).count * s.BC;
    return Geometry{{cuda::ceil_div(e.B * e.T * s.HV, rows), 1, 1}, threads, 0};
  };
  return t;
}

/// One call: ROWS rows of V.
Template cpu(Template t) {
  t = rows::cpu(std::move(t));
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {cuda::ceil_div(e.B * e.T * s.HV, s.ROWS), 1, 1}};
  };
  return t;
}

/// The same with output_quantize behind it.
Template quantizing(Template t, std::string source) {
  t.name = "output_norm_quantize";
  t.summary = "Rows of o normalized, gated and then quantized to e4m3.";
  t.covers = {{stages::output_norm, {{"o", "o_norm"}}}, stages::output_quantize};
  t.constants.emplace_back(constant::SCALE_TOKENS_LAST);
  t.source = std::move(source);
  t.illegal = [apart = t.illegal](const Spec& s, const Limits& limits) {
    if (s.V % kScaledColumns == 0) return apart(s, limits);
    return fmt::format("V={} is not a multiple of {}, the columns of a scale", s.V, kScaledColumns);
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(stage()), cpu(stage()), quantizing(portable(stage()), "portable_quantize.cu"),
          quantizing(cpu(stage()), "cpu_quantize.cpp")};
}

}  // namespace wyvern::output_norm
