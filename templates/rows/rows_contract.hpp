// Tunables and geometry of the templates that reduce every row of K elements: l2norm, l2norm_rstd.
#pragma once

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::rows {

/// How portable.cu divides a row: a power of two of lanes, a few vectors of at most 16 bytes each.
struct Lanes {
  std::int64_t count = 1;
  std::int64_t vectors = 1;  ///< of a lane
};
inline Lanes lanes_of_row(std::int64_t columns, DType type) {
  const std::int64_t size = columns * static_cast<std::int64_t>(size_of(type));
  std::int64_t bytes = 16;
  while (size % bytes != 0) bytes /= 2;
  Lanes lanes;
  while (lanes.count < size / bytes && lanes.count < 32) lanes.count *= 2;
  lanes.vectors = cuda::ceil_div(size / bytes, lanes.count);
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
    const std::int64_t at_once = threads / lanes_of_row(s.K, s.DTYPE).count;
    return Geometry{{cuda::ceil_div(rows, at_once), 1, 1}, threads, 0};
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
