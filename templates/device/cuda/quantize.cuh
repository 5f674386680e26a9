// Rows of o to e4m3: the lanes that share a row take kScaledColumns columns side by side.
#pragma once

#include "device/cuda/tile.cuh"
#include "device/quantized.hpp"

namespace wyvern::cuda {

/// y / scale, rounded once. The remainder of the product with the reciprocal corrects it, which is
/// the quotient itself for each significand that 16 bits have and each scale that quantize() makes
/// of one; fp32 has too many to try.
template <class T>
WYVERN_DEVICE float quotient(T y, float scale, float reciprocal) {
  const float x = to_float(y);
  if constexpr (sizeof(T) == 4) return x / scale;
  const float near = x * reciprocal;
  return fused_multiply_add(fused_multiply_add(-near, scale, x), reciprocal, near);
}

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
  const float scale = most / kLargestScaled, reciprocal = 1.0f / scale;
#pragma unroll
  for (int j = 0; j < kVector; j += 2) {
    const uint16 two = pack_float8<float8_e4m3>(quotient(y.at[j], scale, reciprocal),
                                                quotient(y.at[j + 1], scale, reciprocal));
    codes.at[j].bits = static_cast<unsigned char>(two);
    codes.at[j + 1].bits = static_cast<unsigned char>(two >> 8U);
  }
  return scale;
}

}  // namespace wyvern::cuda
