#include <fmt/format.h>

#include "templates/layer/stages.hpp"
#include "templates/rows/rows_contract.hpp"

namespace wyvern::output_quantize {
namespace {

/// What both variants share.
Template stage() {
  Template t;
  t.name = "output_quantize";
  t.covers = {stages::output_quantize};
  t.constants = {constant::DTYPE, constant::V, constant::SCALE_TOKENS_LAST};
  t.strided = {"o"};
  return t;
}

std::string illegal(const Spec& s, const Limits&) {
  if (s.V % kScaledColumns == 0) return {};
  return fmt::format("V={} is not a multiple of {}, the columns of a scale", s.V, kScaledColumns);
}

std::int64_t groups(const Spec& s, const Extents& e) {
  return e.B * e.T * s.HV * (s.V / kScaledColumns);
}

/// CUDA, sm_80 and up: 16 or 32 lanes of a warp a group of columns, BC groups at once.
Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::num_warps, cuda::integers({8, 4, 16})},
                {tunable::BC, cuda::integers({4, 2, 1})}};
  t.source = "portable.cu";
  t.illegal = illegal;
  t.fallback = [](Spec& s, const Limits&) { s.num_warps = 8, s.BC = 4; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t threads = s.num_warps * 32;
    const std::int64_t at_once = threads / rows::lanes_of_row(kScaledColumns, s.DTYPE).count * s.BC;
    return Geometry{{cuda::ceil_div(groups(s, e), at_once), 1, 1}, threads, 0};
  };
  return t;
}

/// One call: ROWS groups of columns.
Template cpu(Template t) {
  t = rows::cpu(std::move(t));
  t.illegal = illegal;
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {cuda::ceil_div(groups(s, e), s.ROWS), 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::output_quantize
