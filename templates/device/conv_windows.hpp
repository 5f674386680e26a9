// Where the windows of a short convolution are: the rows before a sequence's first, and those from
// which it goes on. For kernels of every device; S is the kernel's Spec.
#pragma once

#include "device/conv_rows.hpp"
#include "device/state_slots.hpp"

namespace wyvern {

/// The tensors that have windows, and what says which slots sequences have.
template <class T, class Index>
struct ConvStates {
  const T* initial_conv_state;
  T *final_conv_state, *conv_state;
  int64 stride;  ///< elements from a slot of conv_state to the next
  const Index *state_index, *output_state_index;
  const boolean* has_initial_state;
};

/// The windows of a sequence.
template <class T>
struct ConvWindows {
  const T* first = nullptr;  ///< in front of its first row; null: zeros
  T* last = nullptr;         ///< from which it goes on; null: not written
  bool null = false;         ///< a null sequence: of its rows none is in `last`
};

template <class S, class T, class Index>
ConvWindows<T> find_windows(int64 n, int64 channels, const Extents& e,
                            const ConvStates<T, Index>& of) {
  ConvWindows<T> windows;
  windows.null = is_null_sequence<S>(n, e, of.state_index, of.output_state_index);
  const int64 window = channels * (S::CONV_WIDTH - 1);
  if constexpr (S::CONV_FINAL) windows.last = of.final_conv_state + n * window;
  if (windows.null) return windows;
  int64 from = n;
  if constexpr (S::STATE_INDEX) from = of.state_index[n];
  if constexpr (S::CONV_INPLACE) {
    int64 to = from;
    if constexpr (S::OUTPUT_STATE_INDEX) to = of.output_state_index[n];
    windows.last = of.conv_state + to * of.stride;
  }
  if constexpr (S::CONV_INPLACE || S::CONV_INITIAL)
    if (starts_from_slot<S>(n, of.has_initial_state))
      windows.first = S::CONV_INPLACE ? of.conv_state + from * of.stride
                                      : of.initial_conv_state + from * window;
  return windows;
}

/// How windows lie: with channels side by side, or with kColumns columns of a channel.
template <bool kTokensFirst_, int64 kColumns_>
struct WindowLayout {
  static constexpr bool kTokensFirst = kTokensFirst_;
  static constexpr int64 kColumns = kColumns_;
};

/// Those in front of sequences, and behind them.
template <class S>
using GivenWindows = WindowLayout<S::CONV_INPLACE && S::CONV_TOKENS_FIRST,
                                  S::CONV_INPLACE ? S::CONV_LENGTH : S::CONV_WIDTH - 1>;

/// Where a column of a channel is in a window.
template <class S, class Layout = GivenWindows<S>>
int64 window_place(int64 channel, int64 column, int64 channels) {
  return Layout::kTokensFirst ? column * channels + channel : channel * Layout::kColumns + column;
}

/// Writes columns of one channel, whose rows are `row_stride` elements apart, of the windows'
/// sequence, which begins with row `begin` of the batch: rows `token` to `end`, of which those in
/// front of `begin` are the first window's. It reads no column behind one that it has written, so
/// that both windows may be one.
template <class S, class T>
void write_columns(const ConvWindows<T>& windows, const T* rows, int64 row_stride, int64 channel,
                   int64 channels, int64 begin, int64 token, int64 end) {
  for (int64 j = 0; token < end; ++j, ++token) {
    T x = {};
    if (token >= begin && !windows.null)
      x = rows[token * row_stride];
    else if (windows.first != nullptr)
      x = windows.first[window_place<S>(channel, window_column<S>(token, begin), channels)];
    windows.last[window_place<S>(channel, j, channels)] = x;
  }
}

/// The window of a sequence's last rows, rows `begin` to `end` of the batch.
template <class S, class T>
void write_last_window(const ConvWindows<T>& windows, const T* rows, int64 row_stride,
                       int64 channel, int64 channels, int64 begin, int64 end) {
  write_columns<S>(windows, rows, row_stride, channel, channels, begin, end - (S::CONV_WIDTH - 1),
                   end);
}

/// The first of the batch's `tokens` rows from `token` on that goes with no row before `token`: the
/// first rows of a sequence go together where their window is written in place, so that who reads
/// it also writes it. `tokens` where there is none.
template <class S, class Seqlens>
int64 first_free_row(int64 token, int64 tokens, const Sequences<S, Seqlens>& sequences) {
  if (token >= tokens) return tokens;
  if constexpr (!S::CONV_INPLACE) return token;
  const int64 n = sequences.of(token), begin = sequences.begin(n), end = sequences.begin(n + 1);
  if (token == begin || token - begin >= S::CONV_WIDTH - 1) return token;
  return begin + S::CONV_WIDTH - 1 < end ? begin + S::CONV_WIDTH - 1 : end;
}

}  // namespace wyvern
