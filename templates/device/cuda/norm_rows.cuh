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

/// Adds the squares of a vector's elements.
template <class T, int kVector>
WYVERN_DEVICE void add_squares(const Vector<T, kVector>& x, float& sum) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float value = to_float(x.at[j]);
    sum = fused_multiply_add(value, value, sum);
  }
}

/// A normalized and weighed element x of a kernel with the Spec S, for its input z of the gate. An
/// x that is 0 stays 0 for any gate: rows of null sequences are 0, and their gates were never
/// written.
template <class S>
WYVERN_DEVICE float gated(float x, float z) {
  const float open = reciprocal_fast(1.0f + exp2_fast(z * -1.44269504f));
  return x == 0.0f ? 0.0f : x * (S::NORM_SILU ? z * open : open);
}

/// Elements x of a row with the scale rstd, normalized, weighed and gated by z.
template <class S, class T, int kVector>
WYVERN_DEVICE Vector<T, kVector> normalized(const Vector<T, kVector>& x,
                                            const Vector<T, kVector>& z,
                                            const NormWeights<kVector>& weights, float rstd) {
  Vector<T, kVector> y;
#pragma unroll
  for (int j = 0; j < kVector; ++j)
    y.at[j] = from_float<T>(gated<S>(to_float(x.at[j]) * rstd * weights.at[j], to_float(z.at[j])));
  return y;
}

}  // namespace wyvern::cuda
