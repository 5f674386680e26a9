// The weights of a thread's channels of a short convolution, its function of convolved rows, and
// its windows.
#pragma once

#include "device/conv_windows.hpp"
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

/// Row `now` of kVector channels, from rows[now] and those before it in a ring.
template <class S, class T, int kVector, int kSlots>
WYVERN_DEVICE Vector<T, kVector> convolved_row(const ConvTaps<S, kVector>& taps,
                                               const float (&rows)[kSlots][kVector], int now) {
  Vector<T, kVector> y;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float c = taps.convolved(rows, now, j);
    y.at[j] = from_float<T>(S::CONV_SILU ? c * conv_gate(c) : c);
  }
  return y;
}

/// The columns in use of a window, of kVector channels, oldest first, as they are in memory.
template <class S, class T, int kVector>
struct ConvWindow {
  static constexpr int kBefore = S::CONV_WIDTH - 1;
  Vector<T, kVector> columns[kBefore];

  /// Zeros where `window` is null.
  template <class Layout = GivenWindows<S>>
  WYVERN_DEVICE void load_from(const T* window, int64 channel, int64 channels) {
#pragma unroll
    for (auto& column : columns) column = {};
    if (window == nullptr) return;
    if constexpr (kDense<Layout>) {
#pragma unroll
      for (int part = 0; part < kBefore; ++part) {
        const auto some = load<kVector>(window + channel * kBefore + part * kVector);
#pragma unroll
        for (int i = 0; i < kVector; ++i) place(part * kVector + i) = some.at[i];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kBefore; ++j) {
        const T* const from = window + window_place<S, Layout>(channel, j, channels);
        if constexpr (Layout::kTokensFirst) {
          columns[j] = load<kVector>(from);
        } else {
#pragma unroll
          for (int c = 0; c < kVector; ++c) columns[j].at[c] = from[c * Layout::kColumns];
        }
      }
    }
  }

  template <class Layout = GivenWindows<S>>
  WYVERN_DEVICE void store_to(T* window, int64 channel, int64 channels) {
    if constexpr (kDense<Layout>) {
#pragma unroll
      for (int part = 0; part < kBefore; ++part) {
        Vector<T, kVector> some;
#pragma unroll
        for (int i = 0; i < kVector; ++i) some.at[i] = place(part * kVector + i);
        store_vector(window + channel * kBefore + part * kVector, some);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kBefore; ++j)
        store_column<Layout>(window, j, columns[j], channel, channels);
    }
  }

  /// One column of any, of these channels.
  template <class Layout = GivenWindows<S>>
  WYVERN_DEVICE static void store_column(T* window, int64 column, const Vector<T, kVector>& row,
                                         int64 channel, int64 channels) {
    T* const to = window + window_place<S, Layout>(channel, column, channels);
    if constexpr (Layout::kTokensFirst) {
      store_vector(to, row);
    } else {
#pragma unroll
      for (int c = 0; c < kVector; ++c) to[c * Layout::kColumns] = row.at[c];
    }
  }

  /// A row behind all others; the oldest one is left out.
  WYVERN_DEVICE void push(const Vector<T, kVector>& row) {
#pragma unroll
    for (int j = 0; j + 1 < kBefore; ++j) columns[j] = columns[j + 1];
    columns[kBefore - 1] = row;
  }

 private:
  /// Whether the columns of a channel lie side by side and all of them are in use.
  template <class Layout>
  static constexpr bool kDense = !Layout::kTokensFirst && Layout::kColumns == kBefore;

  /// Element i of a dense window of these channels.
  WYVERN_DEVICE T& place(int i) { return columns[i % kBefore].at[i / kBefore]; }
};

}  // namespace wyvern::cuda
