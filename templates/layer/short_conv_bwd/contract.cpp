#include <algorithm>

#include "templates/cost.hpp"
#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/layer/layout.hpp"
#include "templates/layer/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::short_conv_bwd {
namespace {

/// What both variants share.
Template stage() {
  Template t;
  t.name = "short_conv_bwd";
  t.covers = {stages::short_conv_bwd};
  t.constants = {constant::DTYPE,      constant::K,         constant::V,
                 constant::CONV_WIDTH, constant::CONV_SILU, constant::STEPS};
  t.strided = {"q", "k", "v", "dq_conv", "dk_conv", "dv_conv", "dq", "dk", "dv"};
  t.illegal = [](const Spec& s, const Limits&) {
    return std::string(s.CONV_WIDTH == 0 ? "the problem has no short_conv" : "");
  };
  return t;
}

/// Channels of a lane of portable.cu.
std::int64_t channels(const Spec& s) {
  const auto size = static_cast<std::int64_t>(size_of(s.DTYPE));
  std::int64_t bytes = 16;
  while (bytes > size && (s.K * size % bytes != 0 || s.V * size % bytes != 0)) bytes /= 2;
  return std::min<std::int64_t>(bytes / size, kMostVector);
}

/// Blocks of one part: each has its lanes' channels.
std::int64_t blocks_of_part(const Spec& s) {
  return cuda::ceil_div(s.CONV_CHANNELS / channels(s), 32);
}

/// Microseconds: two tensors of rows in and one out at nine tenths of memory's rate, which all
/// warps that fit on a multiprocessor reach together, and the rows around a warp's own, of which
/// caches hold most.
double cost_of(const Spec& s, const Workload& work, const Limits& limits) {
  if (work.longest == 0) return cost::kLaunch;
  constexpr double kH200 = 4.8e6, kUsual = 12, kFilled = 1.5, kMissed = 0.25;
  const double rate = limits.bytes_per_us > 0 ? limits.bytes_per_us : kH200;
  const double units = std::max(limits.multiprocessors, 1);
  const auto tokens = static_cast<double>(work.extents.B * work.extents.T);
  const double rows = static_cast<double>(kConvPartTokens) / static_cast<double>(s.num_warps);
  const double warps = tokens / rows * static_cast<double>(blocks_of_part(s)) / units;
  const std::int64_t resident = resident_warps(s) / s.num_warps * s.num_warps;  // of whole blocks
  const double again = kMissed * 3 * static_cast<double>(s.CONV_COLUMNS) / rows;
  const double bytes = tokens * static_cast<double>(s.CONV_CHANNELS) *
                       static_cast<double>(size_of(s.DTYPE)) * (3 + again);
  return cost::kLaunch + kFilled +
         bytes / (0.9 * rate * std::min(warps, static_cast<double>(resident)) / kUsual);
}

/// CUDA, sm_80 and up: one block a part of the tokens and a few channels a lane, the tokens split
/// over its warps.
Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::num_warps, cuda::integers({4, 8, 2})}};
  t.source = "portable.cu";
  t.cost = cost_of;
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t threads = s.num_warps * 32;
    const std::int64_t windows = s.CONV_INITIAL ? e.N * s.CONV_CHANNELS : 0;
    return cuda::launch(e.TP * blocks_of_part(s) + cuda::ceil_div(windows, threads), s,
                        SharedLayout(s).bytes);
  };
  return t;
}

/// One call: one part of the tokens, or a sequence without tokens; channels of q, or of a step of k
/// or v.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {e.TP + (s.CONV_INITIAL ? e.N : 0), 1 + 2 * s.STEPS, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::short_conv_bwd
