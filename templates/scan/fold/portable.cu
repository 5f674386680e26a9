// The states that enter ranges in the order of tokens, S <- M S + R; with BACKWARDS the gradients
// of those that leave them, from the last range on, by M transposed. All in fp32, the sum over rows
// of S in their order. A thread has kColumns columns of rows kRowThreads apart.
#include "device/cuda/tile.cuh"
#include "scan/fold/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr fold::SharedLayout<Spec> kLayout{Spec{}};
constexpr int kDepth = fold::kDepth;
constexpr int kColumns = fold::kColumns;
constexpr int kRowThreads = kLayout.row_threads;
constexpr int kRows = kLayout.rows;
constexpr int kTilesV = ceil_div(V, BV);
constexpr int kTilesK = ceil_div(K, kDepth);
/// Elements of a tile of M that a thread loads.
constexpr int kAhead = ceil_div(kDepth * K, kThreads);

using Columns = Vector<float, kColumns>;

/// This thread's columns of a row; those past the last are 0.
WYVERN_DEVICE Columns load_columns(const float* row, int first) {
  if constexpr (V % kColumns == 0 && SUMMARY_COLUMNS % kColumns == 0) {
    if (first < V) return load<kColumns>(row + first);
    return {};
  } else {
    Columns x = {};
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (first + c < V) x.at[c] = row[first + c];
    return x;
  }
}
WYVERN_DEVICE void store_columns(float* row, int first, const Columns& x) {
  if constexpr (V % kColumns == 0) {
    if (first < V) store_vector(row + first, x);
  } else {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (first + c < V) row[first + c] = x.at[c];
  }
}

/// A tile of M: its columns from kDepth `tile` on, BACKWARDS its rows, on the way to shared memory.
struct TileOfM {
  float x[kAhead];

  /// An element's place along the sum, and its row of the product.
  WYVERN_DEVICE static int depth_of(int i) { return BACKWARDS ? i / K : i % kDepth; }
  WYVERN_DEVICE static int row_of(int i) { return BACKWARDS ? i % K : i / kDepth; }

  WYVERN_DEVICE void fetch(const float* M, int tile) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int i = thread_index() + n * kThreads;
      const int depth = tile * kDepth + depth_of(i);
      const int64 at = BACKWARDS ? int64{depth} * SUMMARY_COLUMNS + row_of(i)
                                 : int64{row_of(i)} * SUMMARY_COLUMNS + depth;
      x[n] = i < kDepth * K && depth < K ? M[at] : 0.0f;
    }
  }
  WYVERN_DEVICE void store(float* to) const {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int i = thread_index() + n * kThreads;
      if (i < kDepth * K) to[depth_of(i) * kLayout.stride + row_of(i)] = x[n];
    }
  }
};

/// sums += M times the state in shared memory. `any` collects whether a row of M has an element
/// that is not 0: the others add nothing, whatever the state is.
WYVERN_DEVICE void multiply(unsigned char* shared, const float* M, int row, int column,
                            Columns (&sums)[kRows], uint32 (&any)[kRows]) {
  float* const tile_of_M = array_at<kLayout.M>(shared);
  const float* const state = array_at<kLayout.state>(shared);
  TileOfM ahead;
  ahead.fetch(M, 0);
#pragma unroll 1
  for (int tile = 0; tile < kTilesK; ++tile) {
    ahead.store(tile_of_M);
    sync_block();
    if (tile + 1 < kTilesK) ahead.fetch(M, tile + 1);
#pragma unroll 8
    for (int depth = 0; depth < kDepth; ++depth) {
      const Columns s = load<kColumns>(state + (tile * kDepth + depth) * BV + column);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float m = tile_of_M[depth * kLayout.stride + row + r * kRowThreads];
        any[r] |= float_bits(m) << 1U;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[r].at[c] += m * s.at[c];
      }
    }
    sync_block();
  }
}

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() / kTilesV;
  const int row = thread_index() % kRowThreads;
  const int column = thread_index() / kRowThreads * kColumns;  // of the block's
  const int first = block_index() % kTilesV * BV + column;
  float* const state = array_at<kLayout.state>(shared_memory());
  if constexpr (TRANSITION)
    for (int i = K * BV + thread_index(); i < kLayout.depth * BV; i += kThreads) state[i] = 0.0f;
  Columns own[kRows] = {};
#pragma unroll 1
  for (int64 step = 0; step < e.N; ++step) {
    // A wrong order gives wrong numbers, but no stray access.
    const int64 given = order[BACKWARDS ? e.N - 1 - step : step];
    const int64 range = given < 0 ? 0 : given < e.N ? given : e.N - 1;
    const int64 at = range * e.HV + head;
    const float* const summary = summaries + at * K * SUMMARY_COLUMNS;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (const int k = row + r * kRowThreads; k < K)
        store_columns(range_states + (at * K + k) * V, first, own[r]);
    if (step == e.N - 1) break;
    Columns R[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (const int k = row + r * kRowThreads; k < K)
        R[r] = load_columns(summary + int64{k} * SUMMARY_COLUMNS, first);
    Columns sums[kRows] = {};
    uint32 any[kRows] = {};
    if constexpr (TRANSITION)
      if (step > 0) multiply(shared_memory(), summary + V, row, column, sums, any);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int k = row + r * kRowThreads;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        own[r].at[c] = any[r] == 0 ? R[r].at[c] : R[r].at[c] + sums[r].at[c];
      if constexpr (TRANSITION)
        if (k < K) store_vector<true>(state + k * BV + column, own[r]);
    }
  }
}
