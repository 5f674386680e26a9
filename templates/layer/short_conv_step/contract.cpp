#include <algorithm>

#include "templates/cost.hpp"
#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/layer/layout.hpp"
#include "templates/layer/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::short_conv_step {
namespace {

/// What both variants share.
Template stage() {
  Template t;
  t.name = "short_conv_step";
  t.covers = {stages::short_conv_step};
  t.constants = {
      constant::DTYPE,     constant::K,     constant::V,           constant::CONV_WIDTH,
      constant::CONV_SILU, constant::STEPS, constant::CONV_LENGTH, constant::CONV_TOKENS_FIRST,
      constant::KEEP_POOL};
  t.strided = {"q", "k", "v", "conv_state"};
  t.illegal = [](const Spec& s, const Limits&) {
    return std::string(s.CONV_WIDTH == 0 ? "the problem has no short_conv" : "");
  };
  return t;
}

/// Microseconds: each row in and out, and windows, at nine tenths of memory's rate (one H100,
/// 2026-11-28: 3.3 us for one sequence, 57 for 256 of 36,864 channels); a sequence's rows one after
/// another, not measured.
double cost_of(const Spec& s, const Workload& work, const Limits& limits) {
  constexpr double kH200 = 4.8e6, kRow = 0.6;
  const double rate = limits.bytes_per_us > 0 ? limits.bytes_per_us : kH200;
  const auto rows = static_cast<double>(2 * work.extents.B * work.extents.T +
                                        2 * work.extents.N * s.CONV_COLUMNS);
  const double bytes =
      rows * static_cast<double>(s.CONV_CHANNELS) * static_cast<double>(size_of(s.DTYPE));
  const auto later = static_cast<double>(std::max<std::int64_t>(work.longest - 1, 0));
  const double unusual = s.num_warps == 4 ? 0 : 0.1;
  return cost::kLaunch + std::max(bytes / (0.9 * rate), kRow * later) + unusual;
}

/// CUDA, sm_80 and up: a few channels of a sequence a thread.
Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::num_warps, cuda::integers({4, 2, 8})}};
  t.source = "portable.cu";
  t.cost = cost_of;
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t channels = s.num_warps * 32 * channels_of_thread(s);
    return cuda::launch_rows(e.N, cuda::ceil_div(s.CONV_CHANNELS, channels), s, 0);
  };
  return t;
}

/// One call: a sequence.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [](const Spec&, const Extents& e, const Limits&) {
    return Geometry{.grid = {e.N, 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::short_conv_step
