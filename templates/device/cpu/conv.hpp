// A short convolution of a vector of neighbouring channels, and their elements that are not side by
// side: weights and windows, [channels, columns].
#pragma once

#include "device/conv_windows.hpp"
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

/// The weights of `count` channels.
template <class S>
struct ConvTaps {
  f32 weight[S::CONV_WIDTH], bias;

  template <class T>
  ConvTaps(const T* conv_weight, const T* conv_bias, int64 channel, int count) : bias{} {
    for (int i = 0; i < S::CONV_WIDTH; ++i)
      weight[i] = gathered(conv_weight + channel * S::CONV_WIDTH + i, S::CONV_WIDTH, count);
    if constexpr (S::HAS_CONV_BIAS) bias = gathered(conv_bias + channel, 1, count);
  }
};

/// Convolves rows `token` to `last` of the sequence that begins with row `begin`, of `count`
/// channels.
template <class S, class Layout = GivenWindows<S>, class T>
static void convolve_rows(const ChannelRows<const T, T>& rows, const ConvTaps<S>& taps,
                          const ConvWindows<T>& windows, int64 channel, int64 channels, int count,
                          int64 token, int64 last, int64 begin) {
  constexpr int kBefore = S::CONV_WIDTH - 1;
  const auto stride = static_cast<int>(window_place<S, Layout>(1, 0, channels));
  f32 x[S::CONV_WIDTH] = {};
  for (int j = 0; j < kBefore; ++j) {
    const int64 row = token - kBefore + j;
    if (row >= begin)
      x[j] = load_heads(rows.given + row * rows.stride, count);
    else if (windows.first != nullptr)
      x[j] = gathered(
          windows.first + window_place<S, Layout>(channel, window_column<S>(row, begin), channels),
          stride, count);
  }
  for (; token < last; ++token) {
    x[kBefore] = load_heads(rows.given + token * rows.stride, count);
    f32 c = taps.bias;
    for (int i = 0; i < S::CONV_WIDTH; ++i) c += taps.weight[i] * x[i];
    store_heads(rows.convolved + token * rows.convolved_stride, S::CONV_SILU ? c * sigmoid(c) : c,
                count);
    for (int i = 0; i < kBefore; ++i) x[i] = x[i + 1];
  }
}

/// Calls body(first channel, number of channels <= kLanes) until all channels are covered, each
/// time of one row of q, k or v, where they lie side by side.
template <class S, class Body>
static void for_channels(const Extents& e, Body body) {
  const int64 keys = int64{e.H} * S::K, values = int64{e.HV} * S::V;
  const int64 channels = keys + S::STEPS * (keys + values);
  for (int64 channel = 0; channel < channels;) {
    const int64 end = channel + (channel < keys * (1 + S::STEPS) ? keys : values);
    for (; channel < end; channel += kLanes)
      body(channel, end - channel < kLanes ? static_cast<int>(end - channel) : kLanes);
    channel = end;
  }
}

}  // namespace wyvern::cpu
