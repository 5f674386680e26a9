// Rows of q, k and v convolved with the rows before them, ROWS tokens a call, and behind those a
// sequence's last rows a call.
#include "device/conv_rows.hpp"
#include "device/cpu/conv.hpp"

constexpr int kBefore = CONV_WIDTH - 1;

WYVERN_BLOCK {
  const ConvTensors<const DTYPE, DTYPE> tensors{q,        k,      v,      q_stride, k_stride,
                                                v_stride, q_conv, k_conv, v_conv};
  const Sequences<Spec, SEQLENS_DTYPE> sequences{cu_seqlens, e.T, e.N};
  const int64 keys = int64{e.H} * K, values = int64{e.HV} * V;
  const int64 channels = keys + STEPS * (keys + values);
  const int64 tokens = e.B * e.T, tiles = (tokens + ROWS - 1) / ROWS;
  if (block[0] >= tiles) {
    const int64 n = block[0] - tiles, begin = sequences.begin(n), end = sequences.begin(n + 1);
    for (int64 channel = 0; channel < channels; ++channel) {
      const auto rows = rows_of_channel<Spec>(channel, tensors, e);
      const int64 at = (n * channels + channel) * kBefore;
      for (int64 j = 0; j < kBefore; ++j) {
        const int64 token = end - kBefore + j;
        DTYPE x = {};
        if (token >= begin)
          x = rows.given[token * rows.stride];
        else if constexpr (CONV_INITIAL)
          x = initial_conv_state[at + window_column<Spec>(token, begin)];
        final_conv_state[at + j] = x;
      }
    }
    return;
  }
  const int64 first = block[0] * ROWS;
  const int64 last = first + ROWS < tokens ? first + ROWS : tokens;
  // The channels of one row of q, k or v, which lie side by side.
  const auto convolve = [&](int64 channel, int count) {
    const auto rows = rows_of_channel<Spec>(channel, tensors, e);
    f32 weight[CONV_WIDTH], bias{};
    for (int i = 0; i < CONV_WIDTH; ++i)
      weight[i] = gathered(conv_weight + channel * CONV_WIDTH + i, CONV_WIDTH, count);
    if constexpr (HAS_CONV_BIAS) bias = gathered(conv_bias + channel, 1, count);
    for (int64 token = first; token < last;) {
      const int64 n = sequences.of(token), begin = sequences.begin(n);
      const int64 end = sequences.begin(n + 1) < last ? sequences.begin(n + 1) : last;
      f32 x[CONV_WIDTH] = {};
      for (int j = 0; j < kBefore; ++j) {
        const int64 row = token - kBefore + j;
        if (row >= begin)
          x[j] = load_heads(rows.given + row * rows.stride, count);
        else if constexpr (CONV_INITIAL)
          x[j] = gathered(initial_conv_state + (n * channels + channel) * kBefore +
                              window_column<Spec>(row, begin),
                          kBefore, count);
      }
      for (; token < end; ++token) {
        x[kBefore] = load_heads(rows.given + token * rows.stride, count);
        f32 c = bias;
        for (int i = 0; i < CONV_WIDTH; ++i) c += weight[i] * x[i];
        store_heads(rows.convolved + token * rows.convolved_stride, CONV_SILU ? c * sigmoid(c) : c,
                    count);
        for (int i = 0; i < kBefore; ++i) x[i] = x[i + 1];
      }
    }
  };
  for (int64 channel = 0; channel < channels;) {
    const int64 width = channel < keys * (1 + STEPS) ? keys : values, end = channel + width;
    for (; channel < end; channel += kLanes)
      convolve(channel, end - channel < kLanes ? static_cast<int>(end - channel) : kLanes);
    channel = end;
  }
}
