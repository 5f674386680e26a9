// Which rows a short convolution reads: a channel's tensor, a token's sequence, and the rows before
// a sequence's first. For kernels of every device; S is the kernel's Spec.
#pragma once

#include "device/types.hpp"

namespace wyvern {

/// Rows of q, k and v as the caller has them, or of their gradients, and those of convolved q, k
/// and v, with their strides.
template <class Given, class Convolved>
struct ConvTensors {
  Given *q, *k, *v;
  int64 q_stride, k_stride, v_stride;
  Convolved *q_conv, *k_conv, *v_conv;
  int64 q_conv_stride, k_conv_stride, v_conv_stride;
};

/// A channel's elements, a token's row `stride` and `convolved_stride` elements from the next
/// one's.
template <class Given, class Convolved>
struct ChannelRows {
  Given* given;
  int64 stride;
  Convolved* convolved;
  int64 convolved_stride;
};

/// Channels are those of q, then of each step of k, then of each step of v.
template <class S, class Given, class Convolved>
ChannelRows<Given, Convolved> rows_of_channel(int64 channel,
                                              const ConvTensors<Given, Convolved>& of,
                                              const Extents& e) {
  constexpr int64 kSteps = S::STEPS;
  const int64 keys = int64{e.H} * S::K, values = int64{e.HV} * S::V;
  if (channel < keys) return {of.q + channel, of.q_stride, of.q_conv + channel, of.q_conv_stride};
  const bool of_key = channel < keys * (1 + kSteps);
  const int64 at = channel - (of_key ? keys : keys * (1 + kSteps));
  const int64 width = of_key ? keys : values, step = kSteps == 1 ? 0 : at / width;
  const int64 row = of_key ? of.k_stride : of.v_stride;
  const int64 convolved_row = of_key ? of.k_conv_stride : of.v_conv_stride;
  const int64 in_row = at - step * width;
  return {(of_key ? of.k : of.v) + step * row + in_row, kSteps * row,
          (of_key ? of.k_conv : of.v_conv) + step * convolved_row + in_row, kSteps * convolved_row};
}

/// The sequences of a batch, by its tokens. What cu_seqlens holds is not trusted: no row outside
/// the batch is named.
template <class S, class Seqlens>
struct Sequences {
  const Seqlens* cu_seqlens;  ///< null unless S::VARLEN
  int64 T, N;

  /// The first token of sequence n; of n = N, the end of the batch.
  int64 begin(int64 n) const {
    if constexpr (!S::VARLEN) return n * T;
    if (n == 0 || n == N) return n == 0 ? 0 : T;
    const int64 given = cu_seqlens[n];
    return given < 0 ? 0 : given > T ? T : given;
  }
  /// The sequence of a token of the batch.
  int64 of(int64 token) const {
    if constexpr (!S::VARLEN) return token / T;
    int64 low = 0, high = N;
    while (high - low > 1) {
      const int64 middle = low + (high - low) / 2;
      (begin(middle) <= token ? low : high) = middle;
    }
    return low;
  }
};

/// The column of a sequence's initial window that stands for row `token`, before its first token
/// `begin`.
template <class S>
int64 window_column(int64 token, int64 begin) {
  const int64 column = S::CONV_WIDTH - 1 + token - begin;
  return column < 0 ? 0 : column;
}

}  // namespace wyvern
