// Rows of o to e4m3: the lanes that share a row take kScaledColumns columns side by side.
#pragma once

#include "device/cuda/tile.cuh"
#include "device/quantized.hpp"

namespace wyvern::cuda {

/// Quantizes a group of columns, kVector of each of its lanes, and returns its scale in all of
/// them. All lanes of the warp take part.
template <class T, int kVector>
WYVERN_DEVICE float quantize(const Vector<T, kVector>& y, Vector<float8_e4m3, kVector>& codes) {
  float most = kLeastScaled;
#pragma unroll
  for (int j = 0; j < kVector; ++j) most = maximum(most, absolute(to_float(y.at[j])));
#pragma unroll
  for (int mask = kScaledColumns / kVector / 2; mask > 0; mask /= 2)
    most = maximum(most, shuffle_xor(most, mask));
  const float scale = most / kLargestScaled;
#pragma unroll
  for (int j = 0; j < kVector; ++j)
    codes.at[j] = from_float<float8_e4m3>(to_float(y.at[j]) / scale);
  return scale;
}

}  // namespace wyvern::cuda
