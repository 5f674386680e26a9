// Rows of q, k and v convolved with the rows before them. A thread has a few channels of ROWS
// tokens: it keeps the last CONV_WIDTH rows in registers, so that each is read once but for those
// before its first token, and loads kAhead rows ahead of the one that it computes, so that enough
// bytes are under way. The blocks behind those write each sequence's last rows. In a pool the
// thread with a sequence's first rows does, after it has read the rows before them; those blocks
// are left with sequences that have no rows.
#include "device/cuda/conv_taps.cuh"

constexpr int kThreads = num_warps * 32;
// Registers for 16 warps a multiprocessor, or beside a bias for 12.
constexpr int kBlocks = (HAS_CONV_BIAS ? 12 : 16) / num_warps;
constexpr int kVector =
    smaller(vector_bytes<DTYPE>(K), vector_bytes<DTYPE>(V)) / static_cast<int>(sizeof(DTYPE));
constexpr int kAhead = 4;  // and rows in registers, so that an unrolled loop moves none of them
constexpr int kBefore = CONV_WIDTH - 1;
static_assert(CONV_WIDTH <= kAhead);
using Part = Vector<DTYPE, kVector>;

using Taps = ConvTaps<Spec, kVector>;
using Window = ConvWindow<Spec, DTYPE, kVector>;

/// Writes the last rows of a sequence that has rows, `begin` to `end` of the batch.
WYVERN_DEVICE void write_window(const ConvWindows<DTYPE>& windows, const DTYPE* rows,
                                int64 row_stride, int64 channel, int64 channels, int64 begin,
                                int64 end) {
  Window window;
  window.load_from(windows.first, channel, channels);
#pragma unroll 1
  for (int64 token = end - begin < kBefore ? begin : end - kBefore; token < end; ++token)
    window.push(load<kVector>(rows + token * row_stride));
  window.store_to(windows.last, channel, channels);
}

WYVERN_KERNEL(kThreads, kBlocks) {
  const ConvTensors<const DTYPE, DTYPE> tensors{
      q,      k,      v,      q_stride,      k_stride,      v_stride,
      q_conv, k_conv, v_conv, q_conv_stride, k_conv_stride, v_conv_stride};
  const Sequences<Spec, SEQLENS_DTYPE> sequences{cu_seqlens, e.T, e.N};
  const int64 keys = int64{e.H} * K, values = int64{e.HV} * V;
  const int64 channels = keys + STEPS * (keys + values);
  const int64 tokens = e.B * e.T, tiles = (tokens + ROWS - 1) / ROWS;
  const int64 vectors = channels / kVector;
  const int64 row_blocks = (tiles * vectors + kThreads - 1) / kThreads;
  const ConvStates<DTYPE, INDEX_DTYPE> states{
      initial_conv_state, final_conv_state,   conv_state,       conv_state_stride,
      state_index,        output_state_index, has_initial_state};
  if ((CONV_FINAL || CONV_INPLACE) && block_index() >= row_blocks) {
    const int64 i = (block_index() - row_blocks) * kThreads + thread_index();
    const int64 n = i / channels, channel = i - n * channels;
    if (n >= e.N) return;
    const int64 begin = sequences.begin(n), end = sequences.begin(n + 1);
    if (CONV_INPLACE && begin < end) return;
    const auto windows = find_windows<Spec>(n, channels, e, states);
    if (windows.last == nullptr) return;
    const auto rows = rows_of_channel<Spec>(channel, tensors, e);
    write_last_window<Spec>(windows, rows.given, rows.stride, channel, channels, begin, end);
    return;
  }
  const int64 i = int64{block_index()} * kThreads + thread_index();
  const int64 tile = i / vectors, channel = (i - tile * vectors) * kVector;
  if (tile >= tiles) return;
  auto rows = rows_of_channel<Spec>(channel, tensors, e);
  Taps taps = {};
  taps.load_from(conv_weight, conv_bias, channel);
  const int last = static_cast<int>(first_free_row<Spec>((tile + 1) * ROWS, tokens, sequences));
  int token = static_cast<int>(first_free_row<Spec>(tile * ROWS, tokens, sequences));
  rows.given += token * rows.stride;
  rows.convolved += token * rows.convolved_stride;
#pragma unroll 1
  while (token < last) {
    const int64 n = sequences.of(token);
    const int begin = static_cast<int>(sequences.begin(n));
    const int end = static_cast<int>(sequences.begin(n + 1));
    const auto windows = find_windows<Spec>(n, channels, e, states);
    // Slot i of the ring has the rows i, i + kAhead, ... from `token` on.
    float ring[kAhead][kVector];
#pragma unroll
    for (int j = 0; j < kBefore; ++j) {
      float(&to)[kVector] = ring[kAhead - kBefore + j];
      const int row = token - kBefore + j;
      if (row >= begin) {
        load_floats<kVector>(rows.given + (j - kBefore) * rows.stride, to);
      } else {
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          to[c] = 0.0f;
          if (windows.first != nullptr)
            to[c] = to_float(windows.first[window_place<Spec>(
                channel + c, window_column<Spec>(row, begin), channels)]);
        }
      }
    }
    if (CONV_INPLACE && token == begin && windows.last != nullptr)
      write_window(windows, rows.given - token * rows.stride, rows.stride, channel, channels, begin,
                   end);
    int left = (end < last ? end : last) - token;
    token += left;
    Part ahead[kAhead] = {};
#pragma unroll
    for (int r = 0; r < kAhead; ++r, rows.given += rows.stride)
      if (r < left) ahead[r] = load<kVector>(rows.given);
#pragma unroll 1
    for (; left > 0; left -= kAhead)
#pragma unroll
      for (int r = 0; r < kAhead;
           ++r, rows.given += rows.stride, rows.convolved += rows.convolved_stride) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) ring[r][c] = to_float(ahead[r].at[c]);
        if (r + kAhead < left) ahead[r] = load<kVector>(rows.given);
        if (r < left) store_vector(rows.convolved, convolved_row<Spec, DTYPE>(taps, ring, r));
      }
    // Back to the next sequence's first row.
    rows.given += (left - kAhead) * rows.stride;
    rows.convolved += left * rows.convolved_stride;
  }
}
