// Rows of q, k and v convolved with the rows before them, and each sequence's last rows. A thread
// has a few channels of a sequence: it reads their window, goes through the sequence and writes the
// window from which it goes on, or the columns of drafts, so that both may be one. In a tree of
// drafts a token finds its parent's window where the thread has written it.
#include "device/conv_drafts.hpp"
#include "device/cuda/conv_taps.cuh"
#include "layer/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kVector = short_conv_step::channels_of_thread(Spec{});
constexpr int kBefore = CONV_WIDTH - 1;
using Part = Vector<DTYPE, kVector>;

// Left to itself ptxas takes 48 registers on sm_80 for some windows, where 54 are needed.
WYVERN_KERNEL(kThreads, 1024 / kThreads) {
  const Sequences<Spec, SEQLENS_DTYPE> sequences{cu_seqlens, e.T, e.N};
  const int64 keys = int64{e.H} * K, values = int64{e.HV} * V;
  const int64 channels = keys + STEPS * (keys + values);
  const ConvTensors<const DTYPE, DTYPE> tensors{
      q, k, v, q_stride, k_stride, v_stride, q_conv, k_conv, v_conv, keys, keys, values};
  const int64 n = block_row();
  const int64 channel = (int64{block_index()} * kThreads + thread_index()) * kVector;
  if (n >= e.N || channel >= channels) return;
  const int64 begin = sequences.begin(n), end = sequences.begin(n + 1);
  const auto windows = find_step_windows<Spec>(
      n, end - begin, channels, e,
      ConvStates<DTYPE, INDEX_DTYPE>{initial_conv_state, final_conv_state, conv_state,
                                     conv_state_stride, state_index, output_state_index,
                                     has_initial_state},
      num_accepted, intermediate_index);
  const auto behind = find_windows_behind<Spec>(n, windows.null, channels, e, intermediate_index,
                                                intermediate_conv_states);
  auto rows = rows_of_channel<Spec>(channel, tensors, e);
  rows.given += begin * rows.stride;
  rows.convolved += begin * rows.convolved_stride;
  ConvTaps<Spec, kVector> taps = {};
  taps.load_from(conv_weight, conv_bias, channel);
  ConvWindow<Spec, DTYPE, kVector> window;
  window.load_from(windows.first, channel, channels);
  // With INDEX_COLUMNS a row's column comes behind that of the row before it.
  const bool keeps_rows = INDEX_COLUMNS && !KEEP_POOL && windows.last != nullptr;
  if (keeps_rows) {
#pragma unroll
    for (int j = 1; j < kBefore; ++j)
      window.store_column(windows.last, j - 1, window.columns[j], channel, channels);
  }
  // With PARENT: the tokens that have a window, a bit for each.
  [[maybe_unused]] unsigned live = 0;
  Part next = {};
  if (begin < end) next = load<kVector>(rows.given);
#pragma unroll 1
  for (int64 token = begin; token < end; ++token) {
    const Part now = next;
    rows.given += rows.stride;
    if (token + 1 < end) next = load<kVector>(rows.given);
    // A null token has zeros, and no window is that behind it.
    bool is_null = false;
    if (PARENT && !windows.null) {
      const int from = parent_of(n, token - begin, e, parent, live);
      is_null = from == kNoToken;
      if (from >= 0)
        window.load_from<DraftWindows<Spec>>(behind.at(from), channel, channels);
      else
        window.load_from(windows.first, channel, channels);
      if (!is_null) live |= 1U << static_cast<int>(token - begin);
    }
    float x[CONV_WIDTH][kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
#pragma unroll
      for (int j = 0; j < kBefore; ++j) x[j][c] = to_float(window.columns[j].at[c]);
      x[kBefore][c] = to_float(now.at[c]);
    }
    auto convolved = convolved_row<Spec, DTYPE>(taps, x, kBefore);
    if (is_null) convolved = {};
    store_vector(rows.convolved, convolved);
    rows.convolved += rows.convolved_stride;
    window.push(now);
    if (keeps_rows && token - begin < columns_of_tokens(end - begin, e))
      window.store_column(windows.last, token - begin + kBefore - 1, now, channel, channels);
    if (INTERMEDIATE_STATES && behind.first != nullptr && !is_null && token - begin < e.D)
      window.store_to<DraftWindows<Spec>>(behind.at(token - begin), channel, channels);
  }
  if (INDEX_COLUMNS || KEEP_POOL || windows.last == nullptr) return;
  if (windows.null) window.load_from(nullptr, channel, channels);
  window.store_to(windows.last, channel, channels);
}
