// Elements of neighbouring channels that are not side by side: weights and windows of a short
// convolution, [channels, columns].
#pragma once

#include "device/cpu/gate.hpp"

namespace wyvern::cpu {

/// `count` channels' elements, `stride` elements apart.
template <class T>
static f32 gathered(const T* from, int stride, int count) {
  f32 x{};
  for (int i = 0; i < count; ++i) x[i] = load_one(from + i * stride);
  return x;
}

template <class T>
static void scatter(T* to, f32 x, int stride, int count) {
  for (int i = 0; i < count; ++i) store_part(to + i * stride, splat(x[i]), 1);
}

}  // namespace wyvern::cpu
