// Rows of o that are normalized, weighed and gated; what the forward and the backward pass share.
#pragma once

#include "device/cuda/rows.cuh"

namespace wyvern::cuda {

/// Whether a kernel with the Spec S covers output_norm.
template <class S>
constexpr bool kHasNorm = requires { S::NORM_SILU; };

/// kVector weights from a column on.
template <int kVector>
struct NormWeights {
  float at[kVector];

  WYVERN_DEVICE void load_from(const float* from) {
    constexpr int kWide = smaller(kVector, 4);
#pragma unroll
    for (int i = 0; i < kVector; i += kWide) {
      const auto part = load<kWide>(from + i);
#pragma unroll
      for (int j = 0; j < kWide; ++j) at[i + j] = part.at[j];
    }
  }
};

/// The sum over the kLanes lanes, a power of two, that share a row; by all lanes of the warp.
template <int kLanes>
WYVERN_DEVICE float sum_lanes(float sum) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  return sum;
}

/// 1 / sqrt(mean + norm_eps) from a row's sum of squares.
template <int kColumns>
WYVERN_DEVICE float norm_rstd(float squares, float norm_eps) {
  // Numbers that are not normal would count as 0.
  return reciprocal_sqrt_fast(maximum(squares * (1.0f / kColumns) + norm_eps, 0x1p-126f));
}

}  // namespace wyvern::cuda
