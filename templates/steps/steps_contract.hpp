// Tunables and geometry of the templates that move whole rows of H K elements.
#pragma once

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::steps {

inline const std::vector<AnyConstant>& kRowConstants = *new std::vector<AnyConstant>{
    constant::DTYPE, constant::H, constant::K, constant::STEPS, constant::FIRST_STEP};

/// Accesses of up to 16 bytes in a row.
inline std::int64_t vectors_of_row(const Spec& s) {
  const std::int64_t row = s.H * s.K * static_cast<std::int64_t>(size_of(s.DTYPE));
  std::int64_t bytes = 16;
  while (row % bytes != 0) bytes /= 2;
  return row / bytes;
}

/// CUDA, sm_80 and up: a thread an access of a row that is written, `rows` of them a token.
inline Template portable(Template t, std::int64_t (*rows)(const Spec&)) {
  t.variant = "portable";
  t.tunables = {{tunable::num_warps, cuda::integers({8, 4})}};
  t.source = "portable.cu";
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec& s, const Limits&) { s.num_warps = 8; };
  t.geometry = [rows](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t accesses = e.B * e.T * rows(s) * vectors_of_row(s);
    return cuda::launch(cuda::ceil_div(accesses, s.num_warps * 32), s, 0);
  };
  return t;
}

/// One call: the rows of ROWS tokens.
inline Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::ROWS, {64, 256}}};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec& s, const Limits&) { s.ROWS = 64; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {(e.B * e.T + s.ROWS - 1) / s.ROWS, 1, 1}};
  };
  return t;
}

}  // namespace wyvern::steps
