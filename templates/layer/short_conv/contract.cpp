#include <fmt/format.h>

#include <algorithm>

#include "templates/cost.hpp"
#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/layer/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::short_conv {
namespace {

/// What both variants share.
Template stage() {
  Template t;
  t.name = "short_conv";
  t.covers = {stages::short_conv};
  t.constants = {
      constant::DTYPE,     constant::K,     constant::V,           constant::CONV_WIDTH,
      constant::CONV_SILU, constant::STEPS, constant::CONV_LENGTH, constant::CONV_TOKENS_FIRST};
  t.strided = {"q", "k", "v", "q_conv", "k_conv", "v_conv", "conv_state"};
  t.illegal = [](const Spec& s, const Limits&) {
    return std::string(s.CONV_WIDTH == 0 ? "the problem has no short_conv" : "");
  };
  return t;
}

std::int64_t tiles(const Spec& s, const Extents& e) { return cuda::ceil_div(e.B * e.T, s.ROWS); }

/// Channels of a thread of portable.cu: at most 16 bytes of a row.
std::int64_t channels(const Spec& s) {
  std::int64_t bytes = 16;
  const auto size = static_cast<std::int64_t>(size_of(s.DTYPE));
  while (bytes > size && (s.K * size % bytes != 0 || s.V * size % bytes != 0)) bytes /= 2;
  return bytes / size;
}

/// Each has its channels of a tile.
std::int64_t threads_of(const Spec& s, const Extents& e) {
  return tiles(s, e) * (s.CONV_CHANNELS / channels(s));
}

/// Microseconds: each row in and out at nine tenths of memory's rate, which so many threads reach
/// together, and the rows before a thread's first, of which caches hold most.
double cost_of(const Spec& s, const Workload& work, const Limits& limits) {
  if (work.longest == 0) return cost::kLaunch;
  constexpr double kH200 = 4.8e6, kThreads = 384, kFilled = 1.5, kMissed = 0.25;
  const double rate = limits.bytes_per_us > 0 ? limits.bytes_per_us : kH200;
  const double units = std::max(limits.multiprocessors, 1);
  const auto elements =
      static_cast<double>(work.extents.B * work.extents.T) * static_cast<double>(s.CONV_CHANNELS);
  const double threads = static_cast<double>(threads_of(s, work.extents));
  const double again = kMissed * static_cast<double>(s.CONV_COLUMNS) / static_cast<double>(s.ROWS);
  const double bytes = elements * static_cast<double>(size_of(s.DTYPE)) * (2 + again);
  return cost::kLaunch + kFilled +
         bytes / (0.9 * rate * std::min(1.0, threads / (units * kThreads)));
}

/// CUDA, sm_80 and up: a few channels of ROWS tokens a thread.
Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::num_warps, cuda::integers({8, 4, 16})},
                {tunable::ROWS, cuda::integers({64, 32, 16, 128})}};
  t.source = "portable.cu";
  t.illegal = [own = t.illegal](const Spec& s, const Limits& limits) {
    if (s.HAS_CONV_BIAS && s.num_warps != 4)
      return fmt::format("num_warps={}: blocks of 4 warps leave registers for a bias", s.num_warps);
    return own(s, limits);
  };
  t.cost = cost_of;
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t threads = s.num_warps * 32;
    const std::int64_t windows = s.CONV_FINAL || s.CONV_INPLACE ? e.N * s.CONV_CHANNELS : 0;
    return cuda::launch(
        cuda::ceil_div(threads_of(s, e), threads) + cuda::ceil_div(windows, threads), s, 0);
  };
  return t;
}

/// One call: ROWS tokens, or a sequence's last rows.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::ROWS, {64, 256}}};
  t.fallback = [](Spec& s, const Limits&) { s.ROWS = 64; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {tiles(s, e) + (s.CONV_FINAL || s.CONV_INPLACE ? e.N : 0), 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::short_conv
