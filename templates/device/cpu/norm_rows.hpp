// Rows of o normalized and gated.
#pragma once

#include "device/cpu/gate.hpp"

namespace wyvern::cpu {

/// 1 / sqrt(mean + norm_eps) of the squares of a row of S::V elements.
template <class S, class T>
static float row_rstd(const T* from, float norm_eps) {
  f32 squares{};
  for_heads(S::V, [&](int c, int count) {
    const f32 x = load_heads(from + c, count);
    squares += x * x;
  });
  return 1.0F / __builtin_sqrtf(sum(squares) / S::V + norm_eps);
}

/// `columns` elements of a row, normalized, weighed and gated.
template <class S, class T>
static void normalize(const T* from, const T* gate, const float* weight, int columns, float rstd,
                      T* to) {
  for_heads(columns, [&](int c, int count) {
    const f32 x = load_heads(from + c, count), z = load_heads(gate + c, count);
    const f32 open = S::NORM_SILU ? z * sigmoid(z) : sigmoid(z);
    const f32 y = x * rstd * load_heads(weight + c, count) * open;
    // An element that is 0 stays 0 whatever the gate is: rows of null sequences are 0, and nobody
    // wrote their gates.
    store_heads(to + c, x == 0.0F ? f32{} : y, count);
  });
}

}  // namespace wyvern::cpu
