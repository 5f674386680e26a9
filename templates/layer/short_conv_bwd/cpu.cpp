// Gradients of rows of q, k and v that were convolved, and of the weights by parts of the tokens:
// one part a call, and behind those a sequence without tokens a call.
#include "device/conv_rows.hpp"
#include "device/cpu/conv.hpp"

constexpr int kBefore = CONV_WIDTH - 1;

WYVERN_BLOCK {
  const ConvTensors<const DTYPE, const DTYPE> tensors{
      q,       k,       v,       q_stride,       k_stride,       v_stride,
      dq_conv, dk_conv, dv_conv, dq_conv_stride, dk_conv_stride, dv_conv_stride};
  const ConvTensors<DTYPE, const DTYPE> gradients{
      dq,      dk,      dv,      dq_stride,      dk_stride,      dv_stride,
      dq_conv, dk_conv, dv_conv, dq_conv_stride, dk_conv_stride, dv_conv_stride};
  const Sequences<Spec, SEQLENS_DTYPE> sequences{cu_seqlens, e.T, e.N};
  const int64 keys = int64{e.H} * K, values = int64{e.HV} * V;
  const int64 channels = keys + STEPS * (keys + values);
  const bool of_keys = block[1] <= STEPS;
  const int64 width = of_keys ? keys : values;
  const int64 own =
      of_keys ? block[1] * keys : keys * (1 + STEPS) + (block[1] - 1 - STEPS) * values;
  if (block[0] >= e.TP) {
    const int64 n = block[0] - e.TP;
    if (sequences.begin(n) != sequences.begin(n + 1)) return;
    for (int64 i = (n * channels + own) * kBefore; i < (n * channels + own + width) * kBefore;
         ++i) {
      DTYPE x = {};
      if constexpr (CONV_FINAL) x = dfinal_conv_state[i];
      dinitial_conv_state[i] = x;
    }
    return;
  }
  const int64 tokens = e.B * e.T, first = block[0] * kConvPartTokens;
  const int64 last = first + kConvPartTokens < tokens ? first + kConvPartTokens : tokens;
  for (int64 channel = own; channel < own + width; channel += kLanes) {
    const int64 left = own + width - channel;
    const int count = left < kLanes ? static_cast<int>(left) : kLanes;
    const auto rows = rows_of_channel<Spec>(channel, tensors, e);
    const auto to = rows_of_channel<Spec>(channel, gradients, e);
    f32 weight[CONV_WIDTH], bias{}, dweight[CONV_WIDTH] = {}, dbias{};
    for (int i = 0; i < CONV_WIDTH; ++i)
      weight[i] = gathered(conv_weight + channel * CONV_WIDTH + i, CONV_WIDTH, count);
    if constexpr (HAS_CONV_BIAS) bias = gathered(conv_bias + channel, 1, count);
    for (int64 token = first; token < last;) {
      const int64 n = sequences.of(token), begin = sequences.begin(n);
      const int64 behind = sequences.begin(n + 1), end = behind < last ? behind : last;
      const int64 window = (n * channels + channel) * kBefore;
      // The last rows, and the gradients of them behind the convolution.
      f32 x[CONV_WIDTH] = {}, dc[CONV_WIDTH] = {};
      for (int j = 0; j < kBefore; ++j) {
        const int64 row = token - kBefore + j;
        if (row >= begin)
          x[j] = load_heads(rows.given + row * rows.stride, count);
        else if constexpr (CONV_INITIAL)
          x[j] = gathered(initial_conv_state + window + window_column<Spec>(row, begin), kBefore,
                          count);
      }
      for (int64 row = token; row < end + kBefore; ++row) {
        f32 d{};
        x[kBefore] = f32{};
        if (row < behind) {
          x[kBefore] = load_heads(rows.given + row * rows.stride, count);
          d = load_heads(rows.convolved + row * rows.convolved_stride, count);
          if constexpr (CONV_SILU) {
            f32 c = bias;
            for (int i = 0; i < CONV_WIDTH; ++i) c += weight[i] * x[i];
            d *= sigmoid(c) * (1.0F + c * sigmoid(-c));
          }
        }
        dc[kBefore] = d;
        if (row < end) {
          for (int i = 0; i < CONV_WIDTH; ++i) dweight[i] += d * x[i];
          dbias += d;
        }
        f32 dx{};
        for (int i = 0; i < CONV_WIDTH; ++i) dx += weight[i] * dc[kBefore - i];
        if constexpr (CONV_FINAL)
          if (row >= behind)
            dx += gathered(dfinal_conv_state + window + (row - behind), kBefore, count);
        const int64 at = row - kBefore;
        if (at >= token)
          store_heads(to.given + at * to.stride, dx, count);
        else if (CONV_INITIAL && token == begin)
          scatter(dinitial_conv_state + window + (row - token), dx, kBefore, count);
        for (int i = 0; i < kBefore; ++i) x[i] = x[i + 1], dc[i] = dc[i + 1];
      }
      token = end;
    }
    const int64 part = block[0] * channels + channel;
    for (int i = 0; i < CONV_WIDTH; ++i)
      scatter(dconv_weight_part + part * CONV_WIDTH + i, dweight[i], CONV_WIDTH, count);
    if constexpr (HAS_CONV_BIAS) store_heads(dconv_bias_part + part, dbias, count);
  }
}
