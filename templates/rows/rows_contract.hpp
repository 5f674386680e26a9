// Tunables and geometry of the templates that reduce every row of K elements: l2norm, l2norm_rstd.
#pragma once

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::rows {

/// Lanes that share a row in portable.cu: a power of two, one 16-byte (or narrower) vector each.
inline std::int64_t lanes_per_row(const Spec& s) {
  const std::int64_t K = s.K;
  const auto size = static_cast<std::int64_t>(size_of(s.DTYPE));
  std::int64_t bytes = 16;
  while (K * size % bytes != 0) bytes /= 2;
  std::int64_t lanes = 1;
  while (lanes < K * size / bytes && lanes < 32) lanes *= 2;
  return lanes;
}

/// CUDA, sm_80 and up: a few lanes of a warp a row.
inline Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::num_warps, cuda::integers({4, 8, 2})}};
  t.source = "portable.cu";
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec& s, const Limits&) { s.num_warps = 4; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t threads = s.num_warps * 32;
    const std::int64_t rows = e.B * e.T * s.H;
    return Geometry{{cuda::ceil_div(rows, threads / lanes_per_row(s)), 1, 1}, threads, 0};
  };
  return t;
}

/// One call: ROWS vectors of K.
inline Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::ROWS, {256, 64}}};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec& s, const Limits&) { s.ROWS = 256; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t rows = s.ROWS;
    return Geometry{.grid = {(e.B * e.T * s.H + rows - 1) / rows, 1, 1}};
  };
  return t;
}

}  // namespace wyvern::rows
