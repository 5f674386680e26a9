// The state scan's walk through chunks, for the templates that scan whole sequences, segments for
// their effect on a state, and segments from a known state. Chunks of w, k, u and the gate stream
// through num_stages buffers, one barrier a chunk.
#pragma once

#include "device/cuda/walk.cuh"

namespace wyvern::cuda {

/// 16-bit numbers whose sum V' is where it enters the state. With beta up to 2 the state need not
/// decay, and neither does what rounding V' does to it. With few keys, where U is fp32, most of
/// what a chunk's rows add cancels, and what rounding does to them does not.
constexpr int kUpdateParts = kHalf<DTYPE> && (NEG_EIGVAL || !kHalf<U_DTYPE>) ? 2 : 1;

/// One of the buffers that chunks pass through.
struct Stage {
  using Keys = Tile<DTYPE, BT, kPaddedK>;
  using Values = Tile<U_DTYPE, BT, BV>;
  static constexpr int kGateBytes =
      VECTOR_GATE ? kPaddedK * 4 : (SCALAR_GATE ? BT * 4 : 0) + (QK_L2NORM ? BT * 4 : 0);
  static constexpr int kBytes = 2 * Keys::kBytes + Values::kBytes + kGateBytes;

  Keys w, k;
  Values u;
  float* G;       // of the chunk's rows
  float* Gk_end;  // of the chunk's last row
  float* k_rstd;

  WYVERN_DEVICE explicit Stage(int chunk) {
    SharedAllocator shared(chunk % num_stages * kBytes);
    w = shared.tile<Keys>();
    k = shared.tile<Keys>();
    u = shared.tile<Values>();
    if constexpr (SCALAR_GATE) G = shared.take<float>(BT);
    if constexpr (VECTOR_GATE) Gk_end = shared.take<float>(kPaddedK);
    if constexpr (kScaledKeys) k_rstd = shared.take<float>(BT);
  }
};

/// V'^T = U^T - S^T W^T.
WYVERN_DEVICE void subtract_prediction(Accumulator (&values)[kStrips][BT / 8],
                                       const State (&state)[kStrips], const Stage& stage,
                                       int first_col) {
  multiply_rows<precision>(values, state, stage.w);
#pragma unroll
  for (int i = 0; i < kStrips; ++i)
#pragma unroll
    for (int n = 0; n < BT / 8; ++n) {
      const Accumulator u = load_transposed(stage.u, n * 8, first_col + i * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) values[i][n].x[j] = u.x[j] - values[i][n].x[j];
    }
}

/// V'^T <- V'^T diag(exp(G_C - G)), with the scales of keys. kg's rows have both factors already.
WYVERN_DEVICE void decay_to_end(Accumulator (&values)[kStrips][BT / 8], const Stage& stage,
                                int last) {
  if constexpr (SCALAR_GATE || kScaledKeys) {
#pragma unroll
    for (int n = 0; n < BT / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int r = n * 8 + accumulator_col(j);
        float factor = 1.0f;
        if constexpr (SCALAR_GATE) factor = decay(stage.G[last] - stage.G[r]);
        if constexpr (kScaledKeys) factor *= stage.k_rstd[r];
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
#pragma unroll
          for (int half = 0; half < 4; half += 2) {
            float& x = values[i][n].x[j + half];
            x = kScaledKeys ? within_range<DTYPE>(x * factor) : x * factor;
          }
        }
      }
  }
}

/// S^T <- exp(G_C) S^T + V'^T diag(exp(G_C - G)) K; `last` is the chunk's last row. Scales `values`
/// in place.
WYVERN_DEVICE void update_state(State (&state)[kStrips], Accumulator (&values)[kStrips][BT / 8],
                                const Stage& stage, int last) {
  decay_to_end(values, stage, last);
  if constexpr (SCALAR_GATE) decay_state<false>(state, stage.G + last);
  if constexpr (VECTOR_GATE) decay_state<true>(state, stage.Gk_end);
#pragma unroll
  for (int step = 0; step < BT / kDepth<DTYPE>; ++step) {
    FragmentA<DTYPE> a[kStrips];
#pragma unroll
    for (int part = 0; part < kUpdateParts; ++part) {
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        a[i] = fragment_a<DTYPE>(values[i], step);
        if (part + 1 < kUpdateParts)
#pragma unroll
          for (int n = 2 * step; n < 2 * step + 2; ++n)
            values[i][n] = rounded_off<DTYPE>(values[i][n]);
      }
      add_rows<precision>(state, a, stage.k, step);
    }
  }
}

/// Tensors that a walk reads; `k` is kg with a vector gate.
struct ScanInputs {
  const DTYPE* k;
  const DTYPE* w;
  const U_DTYPE* u;
  const float* G;
  const float* Gk;
  const float* k_rstd;
};

/// Takes `state` through the chunks of the walk. `begin` sets it, once the first loads are on their
/// way; `before(chunk, state)` sees the state that enters each chunk, `found(chunk, rows, values)`
/// the chunk's V'^T.
template <class Begin, class Before, class Found>
WYVERN_DEVICE void scan_chunks(State (&state)[kStrips], const ScanInputs& in, const Walk& walk,
                               const Columns& columns, Begin&& begin, Before&& before,
                               Found&& found) {
  const int chunks = ceil_div(walk.tokens, BT);
  const auto load = [&](int chunk) {
    if (chunk < chunks) {
      const Stage stage(chunk);
      const int64 first = walk.token + int64{chunk} * BT;
      const int64 row = first * HV + walk.head;
      const int rows = smaller(walk.tokens - chunk * BT, BT);
      load_tile<kThreads, K>(stage.w, in.w + row * K, HV * K, rows, K);
      load_tile<kThreads, V>(stage.u, in.u + row * V + columns.first, HV * V,
                             columns.values ? rows : 0, columns_from(columns.first));
      if constexpr (SCALAR_GATE) load_column<kThreads, BT>(stage.G, in.G + row, HV, rows);
      if constexpr (VECTOR_GATE)
        load_column<kThreads, kPaddedK>(stage.Gk_end, in.Gk + (row + int64{rows - 1} * HV) * K, 1,
                                        K);
      const int64 row_k = first * kKeyHeads + walk.head / (HV / kKeyHeads);
      if constexpr (kScaledKeys)
        load_column<kThreads, BT>(stage.k_rstd, in.k_rstd + row_k, H, rows);
      load_tile<kThreads, K>(stage.k, in.k + row_k * K, kKeyHeads * K, rows, K);
    }
    copy_async_commit();
  };
  for (int i = 0; i < num_stages - 1; ++i) load(i);
  begin();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if constexpr (num_stages == 1) {
      if (chunk > 0) sync_block();
      load(chunk);
    }
    copy_async_wait<larger(num_stages - 2, 0)>();
    sync_block();
    if constexpr (num_stages > 1) load(chunk + num_stages - 1);
    const Stage stage(chunk);
    const int rows = smaller(walk.tokens - chunk * BT, BT);
    Accumulator values[kStrips][BT / 8];
    before(chunk, state);
    subtract_prediction(values, state, stage, warp_index() * kStrips * 16);
    found(chunk, rows, values);
    update_state(state, values, stage, rows - 1);
  }
}

/// Zeros in BV value columns of one head of the chunk slots that no sequence has, which the
/// sequences share out.
WYVERN_DEVICE void clear_unused_slots(DTYPE* h, int sequence, int head, int tile_v,
                                      const int32* chunk_offsets, const Extents& e) {
  for (int64 slot = chunk_offsets[e.N] + sequence; slot < e.NT; slot += e.N) {
    DTYPE* const h_chunk = h + (slot * HV + head) * K * V + tile_v;
    for (int i = thread_index(); i < K * BV; i += kThreads)
      if (tile_v + i % BV < V) h_chunk[int64{i / BV} * V + i % BV] = from_float<DTYPE>(0.0f);
  }
}

}  // namespace wyvern::cuda
