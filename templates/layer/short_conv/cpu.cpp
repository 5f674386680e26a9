// Rows of q, k and v convolved with the rows before them, ROWS tokens a call, and behind those a
// sequence's last rows a call.
#include "device/cpu/conv.hpp"

WYVERN_BLOCK {
  const ConvTensors<const DTYPE, DTYPE> tensors{
      q,      k,      v,      q_stride,      k_stride,      v_stride,
      q_conv, k_conv, v_conv, q_conv_stride, k_conv_stride, v_conv_stride};
  const ConvStates<DTYPE, INDEX_DTYPE> states{
      initial_conv_state, final_conv_state,   conv_state,       conv_state_stride,
      state_index,        output_state_index, has_initial_state};
  const Sequences<Spec, SEQLENS_DTYPE> sequences{cu_seqlens, e.T, e.N};
  const int64 keys = int64{e.H} * K, values = int64{e.HV} * V;
  const int64 channels = keys + STEPS * (keys + values);
  const int64 tokens = e.B * e.T, tiles = (tokens + ROWS - 1) / ROWS;
  const auto write_window = [&](const ConvWindows<DTYPE>& windows, int64 begin, int64 end) {
    if (windows.last == nullptr) return;
    for (int64 channel = 0; channel < channels; ++channel) {
      const auto rows = rows_of_channel<Spec>(channel, tensors, e);
      write_last_window<Spec>(windows, rows.given, rows.stride, channel, channels, begin, end);
    }
  };
  if (block[0] >= tiles) {
    const int64 n = block[0] - tiles, begin = sequences.begin(n), end = sequences.begin(n + 1);
    if (CONV_INPLACE && begin < end) return;  // the call with its first row does
    write_window(find_windows<Spec>(n, channels, e, states), begin, end);
    return;
  }
  const int64 last = first_free_row<Spec>((block[0] + 1) * ROWS, tokens, sequences);
  for (int64 token = first_free_row<Spec>(block[0] * ROWS, tokens, sequences); token < last;) {
    const int64 n = sequences.of(token), begin = sequences.begin(n), end = sequences.begin(n + 1);
    const int64 behind = end < last ? end : last;
    const ConvWindows<DTYPE> windows = find_windows<Spec>(n, channels, e, states);
    for_channels<Spec>(e, [&](int64 channel, int count) {
      convolve_rows<Spec>(rows_of_channel<Spec>(channel, tensors, e),
                          ConvTaps<Spec>(conv_weight, conv_bias, channel, count), windows, channel,
                          channels, count, token, behind, begin);
    });
    if (CONV_INPLACE && token == begin) write_window(windows, begin, end);
    token = behind;
  }
}
