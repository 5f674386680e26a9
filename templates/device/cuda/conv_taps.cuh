// The weights of a thread's channels of a short convolution, and its function of convolved rows.
#pragma once

#include "device/cuda/tile.cuh"

namespace wyvern::cuda {

/// N elements, one after another in memory, as fp32; `kWidest` elements an access at most.
template <int kWidest, class T, int N>
WYVERN_DEVICE void load_floats(const T* from, float (&to)[N]) {
  constexpr int kWide = smaller(kWidest, 16 / static_cast<int>(sizeof(T)));
#pragma unroll
  for (int i = 0; i < N; i += kWide) {
    const auto part = load<kWide>(from + i);
#pragma unroll
    for (int j = 0; j < kWide; ++j) to[i + j] = to_float(part.at[j]);
  }
}

/// The weights of kVector channels; those of a channel lie side by side.
template <class S, int kVector>
struct ConvTaps {
  float weight[kVector * S::CONV_WIDTH];
  float bias[kVector];

  template <class T>
  WYVERN_DEVICE void load_from(const T* weights, const T* biases, int64 channel) {
    load_floats<kVector>(weights + channel * S::CONV_WIDTH, weight);
    if constexpr (S::HAS_CONV_BIAS) load_floats<kVector>(biases + channel, bias);
  }

  /// Channel j of row `now`, which is in slot `now` of a ring with the rows before it.
  template <int kSlots>
  WYVERN_DEVICE float convolved(const float (&rows)[kSlots][kVector], int now, int j) const {
    float c = bias[j];
#pragma unroll
    for (int i = 0; i < S::CONV_WIDTH; ++i)
      c = fused_multiply_add(weight[j * S::CONV_WIDTH + i],
                             rows[(now - (S::CONV_WIDTH - 1) + i + kSlots) % kSlots][j], c);
    return c;
  }
};

/// sigmoid(c), 0 where exp2 is infinite.
WYVERN_DEVICE float conv_gate(float c) {
  return reciprocal_fast(1.0f + exp2_fast(c * -1.44269504f));
}

}  // namespace wyvern::cuda
