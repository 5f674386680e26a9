// The reverse state scan's walk through chunks, from the last to the first, for the templates that
// scan whole sequences, segments for their effect on a state's gradient, and segments from a known
// one. Chunks of q, k, w, dO, dv_local and the gate stream through num_stages buffers, one barrier
// a chunk.
#pragma once

#include "device/cuda/walk.cuh"

namespace wyvern::cuda {

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

/// dU^T = dv_local^T + (dS^T K^T) diag(exp(G_C - G)), with the scales of keys; kg's rows have both
/// factors already. `last` is the chunk's last row.
WYVERN_DEVICE void value_gradient(Accumulator (&values)[kStrips][BT / 8],
                                  const State (&state)[kStrips], const Stage& stage, int first_col,
                                  int last) {
  multiply_rows<precision>(values, state, stage.k);
#pragma unroll
  for (int n = 0; n < BT / 8; ++n) {
    float factor[2] = {1.0f, 1.0f};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = n * 8 + accumulator_col(j);
      if constexpr (SCALAR_GATE) factor[j] = decay(stage.G[last] - stage.G[r]);
      if constexpr (kScaledKeys) factor[j] *= stage.k_rstd[r];
    }
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      const Accumulator dv = load_transposed(stage.dv, n * 8, first_col + i * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = values[i][n].x[j];
        x = fused_multiply_add(x, factor[j % 2], dv.x[j]);
      }
    }
  }
}

/// From dU^T to the A fragments of -dU^T W. In 16 bits they fit into registers; in fp32 they take
/// dv_local's place in shared memory, where every lane puts back what it read, so that the update
/// is a loop and not thousands of instructions.
WYVERN_DEVICE void negate_gradient(Accumulator (&values)[kStrips][BT / 8], const Stage& stage,
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
          *stage.dv.at(n * 8 + accumulator_col(j),
                       first_col + i * 16 + strip_col(accumulator_row(j))) = from_float<DTYPE>(x);
      }
}

/// Eight rows of scale exp(G) dO, with the scales of queries, transposed.
WYVERN_DEVICE Accumulator load_output_gradient(const Stage& stage, int row, int col, float scale) {
  Accumulator accumulator = load_transposed(stage.dO, row, col);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int r = row + accumulator_col(j);
    float factor = scale;
    if constexpr (SCALAR_GATE) factor *= decay(stage.G[r]);
    if constexpr (kScaledKeys) factor *= stage.q_rstd[r];
    const float x = accumulator.x[j] * factor;
    accumulator.x[j] = kScaledKeys ? within_range<DTYPE>(x) : x;
  }
  return accumulator;
}

/// dS^T <- exp(G_C) dS^T + scale (exp(G) dO)^T Q - dU^T W, after negate_gradient; without the part
/// of dO where there are no `outputs`.
WYVERN_DEVICE void update_state(State (&state)[kStrips],
                                const Accumulator (&values)[kStrips][BT / 8], const Stage& stage,
                                int first_col, int last, float scale, bool outputs) {
  if constexpr (SCALAR_GATE) decay_state<false>(state, stage.G + last);
  if constexpr (VECTOR_GATE) decay_state<true>(state, stage.Gk_end);
#pragma unroll(kHalf<DTYPE> ? BT / 16 : 1)
  for (int step = 0; step < BT / kDepth<DTYPE>; ++step) {
    const int row = step * kDepth<DTYPE>;
    FragmentA<DTYPE> a[kStrips];
    if (outputs) {
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        const int col = first_col + i * 16;
        const Accumulator first = load_output_gradient(stage, row, col, scale);
        if constexpr (kHalf<DTYPE>)
          a[i] = fragment_a<DTYPE>(first, load_output_gradient(stage, row + 8, col, scale));
        else
          a[i] = fragment_a<DTYPE>(first, first);
      }
      add_rows<precision>(state, a, stage.q, step);
    }
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      if constexpr (kHalf<DTYPE>) {
        a[i] = fragment_a<DTYPE>(values[i], step);
      } else {
        const Accumulator dU = load_transposed(stage.dv, row, first_col + i * 16);
        a[i] = fragment_a<DTYPE>(dU, dU);
      }
    }
    add_rows<precision>(state, a, stage.w, step);
  }
}

/// Tensors that a walk reads; `q` and `k` are qg and kg with a vector gate.
struct ScanInputs {
  const DTYPE* q;
  const DTYPE* k;
  const DTYPE* w;
  const DTYPE* dO;
  const DTYPE* dv_local;
  const float* G;
  const float* Gk;
  const float* q_rstd;
  const float* k_rstd;
  float scale;
};

/// Starts copying a chunk's rows, which start at `token`; no q, dO and dv_local without values.
WYVERN_DEVICE void load_chunk(const Stage& stage, const ScanInputs& in, int64 token, int rows,
                              int head, const Columns& columns) {
  const int64 row = token * HV + head;
  const int64 row_k = token * kKeyHeads + head / (HV / kKeyHeads);
  const int value_rows = columns.values ? rows : 0;
  const int cols = columns_from(columns.first);
  load_tile<kThreads, K>(stage.k, in.k + row_k * K, kKeyHeads * K, rows, K);
  load_tile<kThreads, V>(stage.dv, in.dv_local + row * V + columns.first, HV * V, value_rows, cols);
  if constexpr (SCALAR_GATE) load_column<kThreads, BT>(stage.G, in.G + row, HV, rows);
  if constexpr (VECTOR_GATE)
    load_column<kThreads, kPaddedK>(stage.Gk_end, in.Gk + (row + int64{rows - 1} * HV) * K, 1, K);
  if constexpr (kScaledKeys) {
    load_column<kThreads, BT>(stage.q_rstd, in.q_rstd + row_k, H, rows);
    load_column<kThreads, BT>(stage.k_rstd, in.k_rstd + row_k, H, rows);
  }
  load_tile<kThreads, V>(stage.dO, in.dO + row * V + columns.first, HV * V, value_rows, cols);
  load_tile<kThreads, K>(stage.q, in.q + row_k * K, kKeyHeads * K, value_rows, K);
  load_tile<kThreads, K>(stage.w, in.w + row * K, HV * K, rows, K);
}

/// Takes `state` through the chunks of the walk, last to first. `begin` sets it, once the first
/// loads are on their way; `before(chunk, state)` sees the gradient of the state that leaves each
/// chunk, `found(chunk, rows, values)` the chunk's dU^T.
template <class Begin, class Before, class Found>
WYVERN_DEVICE void scan_chunks(State (&state)[kStrips], const ScanInputs& in, const Walk& walk,
                               const Columns& columns, Begin&& begin, Before&& before,
                               Found&& found) {
  const int chunks = ceil_div(walk.tokens, BT);
  const int warp_col = warp_index() * kStrips * 16;
  const auto load = [&](int step) {
    if (step < chunks) {
      const int first = (chunks - 1 - step) * BT;
      load_chunk(Stage(step), in, walk.token + first, smaller(walk.tokens - first, BT), walk.head,
                 columns);
    }
    copy_async_commit();
  };
  for (int i = 0; i < num_stages - 1; ++i) load(i);
  begin();
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
    const int rows = smaller(walk.tokens - chunk * BT, BT);
    Accumulator values[kStrips][BT / 8];
    before(chunk, state);
    value_gradient(values, state, stage, warp_col, rows - 1);
    found(chunk, rows, values);
    negate_gradient(values, stage, warp_col);
    update_state(state, values, stage, warp_col, rows - 1, in.scale, columns.values);
  }
}

}  // namespace wyvern::cuda
