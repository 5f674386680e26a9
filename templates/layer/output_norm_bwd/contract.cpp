#include <fmt/format.h>

#include "templates/layer/layout.hpp"
#include "templates/layer/stages.hpp"
#include "templates/rows/rows_contract.hpp"

namespace wyvern::output_norm_bwd {
namespace {

/// What both variants share.
Template stage() {
  Template t;
  t.name = "output_norm_bwd";
  t.covers = {stages::output_norm_bwd};
  t.constants = {constant::DTYPE, constant::V, constant::NORM_SILU};
  t.strided = {"do", "norm_gate", "dnorm_gate"};
  return t;
}

/// CUDA, sm_80 and up: one block a part of rows, BC of them at once in a few lanes of a warp each.
Template portable(Template t) {
  constexpr std::int64_t kMostVectors = 4;  // of a lane in registers, of each of three tensors
  t.variant = "portable";
  t.tunables = {{tunable::num_warps, cuda::integers({8, 4, 16})},
                {tunable::BC, cuda::integers({2, 1, 4})}};
  t.source = "portable.cu";
  t.illegal = [](const Spec& s, const Limits& limits) {
    if (s.V > kMostHeld && s.BC > 1)
      return fmt::format("BC={}: rows of {} elements are taken one by one", s.BC, s.V);
    const std::int64_t vectors = rows::lanes_of_row(s.V, s.DTYPE).vectors;
    if (s.BC > 1 && s.BC * vectors > kMostVectors)
      return fmt::format("BC={} rows of {} vectors a lane are too many for registers", s.BC,
                         vectors);
    if (s.num_warps > 8 && s.V <= kMostHeld && (s.BC > 2 || vectors > 1))
      return fmt::format("num_warps={} leave too few registers for BC={} rows of {} vectors a lane",
                         s.num_warps, s.BC, vectors);
    return cuda::exceeds_shared(SharedLayout(s).bytes, limits);
  };
  t.fallback = [](Spec& s, const Limits&) {
    s.num_warps = 8;
    s.BC = s.V <= kMostHeld && rows::lanes_of_row(s.V, s.DTYPE).vectors == 1 ? 2 : 1;
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{{e.P, 1, 1}, s.num_warps * 32, SharedLayout(s).bytes};
  };
  return t;
}

/// One call: one part of rows.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [](const Spec&, const Extents& e, const Limits&) {
    return Geometry{.grid = {e.P, 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::output_norm_bwd
