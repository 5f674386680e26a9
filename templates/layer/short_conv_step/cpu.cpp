// Rows of q, k and v convolved with the rows before them, a sequence a call, and its last rows.
#include "device/conv_drafts.hpp"
#include "device/cpu/conv.hpp"

WYVERN_BLOCK {
  const ConvTensors<const DTYPE, DTYPE> tensors{q,        k,      v,      q_stride, k_stride,
                                                v_stride, q_conv, k_conv, v_conv};
  const Sequences<Spec, SEQLENS_DTYPE> sequences{cu_seqlens, e.T, e.N};
  const int64 keys = int64{e.H} * K, values = int64{e.HV} * V;
  const int64 channels = keys + STEPS * (keys + values);
  const int64 n = block[0], begin = sequences.begin(n), end = sequences.begin(n + 1);
  const auto windows = find_step_windows<Spec>(
      n, end - begin, channels, e,
      ConvStates<DTYPE, INDEX_DTYPE>{initial_conv_state, final_conv_state, conv_state,
                                     conv_state_stride, state_index, output_state_index,
                                     has_initial_state},
      num_accepted);
  for_channels<Spec>(e, [&](int64 channel, int count) {
    convolve_rows<Spec>(rows_of_channel<Spec>(channel, tensors, e),
                        ConvTaps<Spec>(conv_weight, conv_bias, channel, count), windows, channel,
                        channels, count, begin, end, begin);
  });
  if (KEEP_POOL || windows.last == nullptr) return;
  for (int64 channel = 0; channel < channels; ++channel) {
    const auto rows = rows_of_channel<Spec>(channel, tensors, e);
    if constexpr (INDEX_COLUMNS)
      write_columns<Spec>(windows, rows.given, rows.stride, channel, channels, begin,
                          begin - (CONV_WIDTH - 2), begin + columns_of_tokens(end - begin, e));
    else
      write_last_window<Spec>(windows, rows.given, rows.stride, channel, channels, begin, end);
  }
}
