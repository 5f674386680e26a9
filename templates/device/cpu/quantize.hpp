// Rows of o to e4m3.
#pragma once

#include "device/cpu/vector.hpp"
#include "device/quantized.hpp"

namespace wyvern::cpu {

/// Quantizes kScaledColumns elements and returns their scale.
template <class T>
inline float quantize(const T* y, float8_e4m3* to) {
  f32 most = splat(kLeastScaled);
  for (int c = 0; c < kScaledColumns; c += kLanes) {
    const f32 x = load(y + c), size = x < 0.0F ? -x : x;
    most = size > most ? size : most;
  }
  float largest = most[0];
  for (int i = 1; i < kLanes; ++i) largest = most[i] > largest ? most[i] : largest;
  const float scale = largest / kLargestScaled;
  for (int c = 0; c < kScaledColumns; c += kLanes) store(to + c, load(y + c) / scale);
  return scale;
}

}  // namespace wyvern::cpu
