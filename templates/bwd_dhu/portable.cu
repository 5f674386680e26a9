// The reverse state scan, one block BV value columns of one sequence and value head. Each warp
// keeps its columns of the state's gradient in registers from the last chunk to the first; chunks
// of q, k, w, dO and dv_local stream through num_stages buffers, one barrier a chunk.
#include "common/cuda/chunk.cuh"
#include "common/cuda/state.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kStrips = BV / 16 / num_warps;
constexpr int kPaddedK = round_up(K, 16);
constexpr int kTilesV = ceil_div(V, BV);
constexpr int kKeyHeads = VECTOR_GATE ? HV : H;  // qg and kg have the value heads
constexpr bool kScaledKeys = QK_L2NORM && !VECTOR_GATE;

/// Columns of V from `first` on, where that is not known to be enough for a strip.
WYVERN_DEVICE int columns_from(int first) { return V % BV == 0 ? BV : V - first; }

/// One of the buffers that chunks pass through.
struct Stage {
  using Keys = Tile<DTYPE, BT, kPaddedK>;
  using Values = Tile<DTYPE, BT, BV>;
  static constexpr int kGateBytes =
      VECTOR_GATE ? kPaddedK * 4 : (SCALAR_GATE ? BT * 4 : 0) + (QK_L2NORM ? 2 * BT * 4 : 0);
  static constexpr int kBytes = 3 * Keys::kBytes + 2 * Values::kBytes + kGateBytes;

  Keys q, k, w;
  Values dO, dv;
  float* G;       // of the chunk's rows
  float* Gk_end;  // of the chunk's last row
  float* q_rstd;
  float* k_rstd;

  WYVERN_DEVICE explicit Stage(int step) {
    SharedAllocator shared(step % num_stages * kBytes);
    q = shared.tile<Keys>();
    k = shared.tile<Keys>();
    w = shared.tile<Keys>();
    dO = shared.tile<Values>();
    dv = shared.tile<Values>();
    if constexpr (SCALAR_GATE) G = shared.take<float>(BT);
    if constexpr (VECTOR_GATE) Gk_end = shared.take<float>(kPaddedK);
    if constexpr (kScaledKeys) {
      q_rstd = shared.take<float>(BT);
      k_rstd = shared.take<float>(BT);
    }
  }
};

using State = StateStrip<kPaddedK>;

/// dU^T = dv_local^T + (dS^T K^T) diag(exp(G_C - G)), with the scales of keys; kg's rows have both
/// factors already. `last` is the chunk's last row.
WYVERN_DEVICE void value_gradient(Piece (&values)[kStrips][BT / 8], const State (&state)[kStrips],
                                  const Stage& stage, int first_col, int last) {
  multiply_rows<precision>(values, state, stage.k);
#pragma unroll
  for (int n = 0; n < BT / 8; ++n) {
    float factor[2] = {1.0f, 1.0f};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = n * 8 + piece_col(j);
      if constexpr (SCALAR_GATE) factor[j] = decay(stage.G[last] - stage.G[r]);
      if constexpr (kScaledKeys) factor[j] *= stage.k_rstd[r];
    }
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      const Piece dv = load_transposed(stage.dv, n * 8, first_col + i * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = values[i][n].x[j];
        x = fused_multiply_add(x, factor[j % 2], dv.x[j]);
      }
    }
  }
}

/// From dU^T to the left operands of -dU^T W. In 16 bits they fit into registers; in fp32 they take
/// dv_local's place in shared memory, where every lane puts back what it read, so that the update is
/// a loop and not thousands of instructions.
WYVERN_DEVICE void negate_gradient(Piece (&values)[kStrips][BT / 8], const Stage& stage,
                                   int first_col) {
#pragma unroll
  for (int i = 0; i < kStrips; ++i)
#pragma unroll
    for (int n = 0; n < BT / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = values[i][n].x[j];
        x = -x;
        if constexpr (!kHalf<DTYPE>)
          *stage.dv.at(n * 8 + piece_col(j), first_col + i * 16 + strip_col(piece_row(j))) =
              from_float<DTYPE>(x);
      }
}

/// Eight rows of scale exp(G) dO, with the scales of queries, transposed.
WYVERN_DEVICE Piece load_output_gradient(const Stage& stage, int row, int col, float scale) {
  Piece piece = load_transposed(stage.dO, row, col);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int r = row + piece_col(j);
    float factor = scale;
    if constexpr (SCALAR_GATE) factor *= decay(stage.G[r]);
    if constexpr (kScaledKeys) factor *= stage.q_rstd[r];
    const float x = piece.x[j] * factor;
    piece.x[j] = kScaledKeys ? within_range<DTYPE>(x) : x;
  }
  return piece;
}

/// dS^T <- exp(G_C) dS^T + scale (exp(G) dO)^T Q - dU^T W, after negate_gradient.
WYVERN_DEVICE void update_state(State (&state)[kStrips], const Piece (&values)[kStrips][BT / 8],
                                const Stage& stage, int first_col, int last, float scale) {
  if constexpr (SCALAR_GATE) decay_state<false>(state, stage.G + last);
  if constexpr (VECTOR_GATE) decay_state<true>(state, stage.Gk_end);
#pragma unroll(kHalf<DTYPE> ? BT / 16 : 1)
  for (int step = 0; step < BT / kDepth<DTYPE>; ++step) {
    const int row = step * kDepth<DTYPE>;
    Left<DTYPE> a[kStrips];
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      const int col = first_col + i * 16;
      const Piece first = load_output_gradient(stage, row, col, scale);
      if constexpr (kHalf<DTYPE>)
        a[i] = left_from<DTYPE>(first, load_output_gradient(stage, row + 8, col, scale));
      else
        a[i] = left_from<DTYPE>(first, first);
    }
    add_rows<precision>(state, a, stage.q, step);
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      if constexpr (kHalf<DTYPE>) {
        a[i] = left_from<DTYPE>(values[i], step);
      } else {
        const Piece dU = load_transposed(stage.dv, row, first_col + i * 16);
        a[i] = left_from<DTYPE>(dU, dU);
      }
    }
    add_rows<precision>(state, a, stage.w, step);
  }
}

WYVERN_KERNEL(kThreads, 0)
(const DTYPE* q, const DTYPE* qg, const DTYPE* k, const DTYPE* kg, const DTYPE* w, const DTYPE* dO,
 const DTYPE* dv_local, const float* G, const float* Gk, const float* q_rstd, const float* k_rstd,
 const float* dht, const int32* seq_offsets, const int32* chunk_offsets, DTYPE* dh, DTYPE* du,
 float* dinitial_state, Extents e) {
  const int head = block_index() / kTilesV % HV;
  const int sequence = block_index() / kTilesV / HV;
  const int tile_v = block_index() % kTilesV * BV;
  const int warp_col = warp_index() * kStrips * 16;  // of the tile
  const int first_v = tile_v + warp_col;
  const Sequence place = locate_sequence<VARLEN, BT>(sequence, e, seq_offsets, chunk_offsets);
  const int chunks = ceil_div(place.tokens, BT);

  const auto load = [&](int step) {
    if (step < chunks) {
      const Stage stage(step);
      const int chunk = chunks - 1 - step;
      const int64 first = place.token + int64{chunk} * BT;
      const int64 row = first * HV + head;
      const int64 row_k = first * kKeyHeads + head / (HV / kKeyHeads);
      const int rows = smaller(place.tokens - chunk * BT, BT);
      const int cols = columns_from(tile_v);
      load_tile<kThreads, K>(stage.k, (VECTOR_GATE ? kg : k) + row_k * K, kKeyHeads * K, rows, K);
      load_tile<kThreads, V>(stage.dv, dv_local + row * V + tile_v, HV * V, rows, cols);
      if constexpr (SCALAR_GATE) load_column<kThreads, BT>(stage.G, G + row, HV, rows);
      if constexpr (VECTOR_GATE)
        load_column<kThreads, kPaddedK>(stage.Gk_end, Gk + (row + int64{rows - 1} * HV) * K, 1, K);
      if constexpr (kScaledKeys) {
        load_column<kThreads, BT>(stage.q_rstd, q_rstd + row_k, H, rows);
        load_column<kThreads, BT>(stage.k_rstd, k_rstd + row_k, H, rows);
      }
      load_tile<kThreads, V>(stage.dO, dO + row * V + tile_v, HV * V, rows, cols);
      load_tile<kThreads, K>(stage.q, (VECTOR_GATE ? qg : q) + row_k * K, kKeyHeads * K, rows, K);
      load_tile<kThreads, K>(stage.w, w + row * K, HV * K, rows, K);
    }
    copy_async_commit();
  };
  for (int i = 0; i < num_stages - 1; ++i) load(i);

  State state[kStrips];
  const int64 state_start = (int64{sequence} * HV + head) * K * V;
  if constexpr (FINAL_STATE)
    visit_state<STATE_V_FIRST, K, V>(state, first_v, [&](int64 offset, float& x) {
      x = dht[state_start + offset];
    });

  for (int step = 0; step < chunks; ++step) {
    if constexpr (num_stages == 1) {
      if (step > 0) sync_block();
      load(step);
    }
    copy_async_wait<larger(num_stages - 2, 0)>();
    sync_block();
    if constexpr (num_stages > 1) load(step + num_stages - 1);

    const Stage stage(step);
    const int chunk = chunks - 1 - step;
    const int rows = smaller(place.tokens - chunk * BT, BT);
    const int64 row = (place.token + int64{chunk} * BT) * HV + head;
    Piece values[kStrips][BT / 8];
    store_state<K, V>(dh + ((place.slot + chunk) * HV + head) * K * V + first_v, state,
                      columns_from(first_v));
    value_gradient(values, state, stage, warp_col, rows - 1);
    store_rows<V>(du + row * V + first_v, int64{HV} * V, values, rows, columns_from(first_v));
    negate_gradient(values, stage, warp_col);
    update_state(state, values, stage, warp_col, rows - 1, e.scale);
  }

  if constexpr (INITIAL_STATE)
    visit_state<STATE_V_FIRST, K, V>(state, first_v, [&](int64 offset, float& x) {
      dinitial_state[state_start + offset] = x;
    });
}
