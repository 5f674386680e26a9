// Rows of q, k and v convolved with the rows before them, a sequence a call, and its last rows, or
// the windows behind drafts.
#include "device/conv_drafts.hpp"
#include "device/cpu/conv.hpp"

WYVERN_BLOCK {
  const Sequences<Spec, SEQLENS_DTYPE> sequences{cu_seqlens, e.T, e.N};
  const int64 keys = int64{e.H} * K, values = int64{e.HV} * V;
  const int64 channels = keys + STEPS * (keys + values);
  const ConvTensors<const DTYPE, DTYPE> tensors{
      q, k, v, q_stride, k_stride, v_stride, q_conv, k_conv, v_conv, keys, keys, values};
  const int64 n = block[0], begin = sequences.begin(n), end = sequences.begin(n + 1);
  const auto windows = find_step_windows<Spec>(
      n, end - begin, channels, e,
      ConvStates<DTYPE, INDEX_DTYPE>{initial_conv_state, final_conv_state, conv_state,
                                     conv_state_stride, state_index, output_state_index,
                                     has_initial_state},
      num_accepted, intermediate_index);
  const auto behind = find_windows_behind<Spec>(n, windows.null, channels, e, intermediate_index,
                                                intermediate_conv_states);
  // The token that a token comes behind.
  constexpr int kMostDrafts = 16;
  const bool is_tree = PARENT && !windows.null;
  int parents[kMostDrafts] = {};
  unsigned live = 0;
  for (int t = 0; is_tree && t < kMostDrafts && t < end - begin; ++t) {
    parents[t] = parent_of(n, t, e, parent, live);
    if (parents[t] != kNoToken) live |= 1U << t;
  }
  const auto before = [&](int64 t) -> int64 {
    return !is_tree ? t - 1 : t < kMostDrafts ? parents[t] : kNoToken;
  };
  // As rows are in memory, oldest tokens first, since a window is made of its parent's.
  for (int64 t = 0; behind.first != nullptr && t < end - begin && t < e.D; ++t) {
    const int64 from = before(t);
    if (from == kNoToken) continue;
    for (int64 channel = 0; channel < channels; ++channel) {
      const auto rows = rows_of_channel<Spec>(channel, tensors, e);
      for (int64 j = 0; j < CONV_WIDTH - 1; ++j) {
        DTYPE x = {};
        if (j == CONV_WIDTH - 2)
          x = rows.given[(begin + t) * rows.stride];
        else if (from >= 0)
          x = behind.at(from)[window_place<Spec, DraftWindows<Spec>>(channel, j + 1, channels)];
        else if (windows.first != nullptr)
          x = windows.first[window_place<Spec>(channel, j + 1, channels)];
        behind.at(t)[window_place<Spec, DraftWindows<Spec>>(channel, j, channels)] = x;
      }
    }
  }
  for_channels<Spec>(e, [&](int64 channel, int count) {
    const auto rows = rows_of_channel<Spec>(channel, tensors, e);
    const ConvTaps<Spec> taps(conv_weight, conv_bias, channel, count);
    if (!is_tree)
      return convolve_rows<Spec>(rows, taps, windows, channel, channels, count, begin, end, begin);
    for (int64 token = begin; token < end; ++token) {
      const int64 from = before(token - begin);
      if (from == kNoToken)
        store_heads(rows.convolved + token * rows.convolved_stride, f32{}, count);
      else if (from < 0)
        convolve_rows<Spec>(rows, taps, windows, channel, channels, count, token, token + 1, token);
      else
        convolve_rows<Spec, DraftWindows<Spec>>(rows, taps,
                                                ConvWindows<DTYPE>{.first = behind.at(from)},
                                                channel, channels, count, token, token + 1, token);
    }
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
