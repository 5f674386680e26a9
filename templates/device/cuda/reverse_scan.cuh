// The reverse state scan over chunks, from the last to the first, for the templates that scan whole
// sequences, segments for their effect on a state's gradient, and segments from a known
// one. Chunks of q, k, w, dO, dv_local and the gate stream through num_stages buffers, one barrier
// a chunk.
#pragma once

#include "device/cuda/scan_block.cuh"
#include "device/scan_inputs.hpp"

namespace wyvern::cuda {

/// The scan of a block's columns of the state's gradient. S is the kernel's Spec.
template <class S>
struct ReverseScan : ScanBlock<S> {
  using Block = ScanBlock<S>;
  using Block::columns_from;
  using Block::kPaddedK;
  using Block::kScaledKeys;
  using Block::kStrips;
  using Block::kThreads;
  using typename Block::State;
  using typename Block::T;
  using typename Block::Values;
  using Inputs = ReverseScanInputs<S>;
  static constexpr int K = S::K, V = S::V;
  static constexpr int BT = S::BT;
  static constexpr ReverseScanLayout<S> kLayout{S{}};

  /// Of enter_unit().
  WYVERN_DEVICE static float* unit_scratch(unsigned char* shared) {
    return array_at<kLayout.largest>(shared);
  }

  /// One of the buffers that chunks pass through; a gate or scale that there is none of has no
  /// place.
  struct Buffer {
    unsigned char* const start;
    TileAt<kLayout.q> q = tile_at<kLayout.q>(start);
    TileAt<kLayout.k> k = tile_at<kLayout.k>(start);
    TileAt<kLayout.w> w = tile_at<kLayout.w>(start);
    TileAt<kLayout.dO> dO = tile_at<kLayout.dO>(start);
    TileAt<kLayout.dv> dv = tile_at<kLayout.dv>(start);
    float* G = array_at<kLayout.G>(start);
    float* Gk_end = array_at<kLayout.Gk_end>(start);
    float* q_rstd = array_at<kLayout.q_rstd>(start);
    float* k_rstd = array_at<kLayout.k_rstd>(start);

    /// The buffer of step `step`; the buffers start at `shared`.
    WYVERN_DEVICE Buffer(unsigned char* shared, int step)
        : start(shared + step % S::num_stages * kLayout.buffer_bytes) {}
  };

  /// dU^T = dv_local^T + (dS^T K^T) diag(exp(G_C - G)), with the scales of keys; kg's rows have
  /// both factors already. `last` is the chunk's last row.
  WYVERN_DEVICE static void value_gradient(Values& values, const State& state, const Buffer& buffer,
                                           int first_col, int last, float dv_factor) {
    multiply_rows<S::precision>(values, state, buffer.k);
#pragma unroll
    for (int n = 0; n < BT / 8; ++n) {
      float factor[2] = {1.0f, 1.0f};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int r = n * 8 + accumulator_col(j);
        if constexpr (S::SCALAR_GATE) factor[j] = decay(buffer.G[last] - buffer.G[r]);
        if constexpr (kScaledKeys) factor[j] *= buffer.k_rstd[r];
      }
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        const Accumulator dv = load_transposed(buffer.dv, n * 8, first_col + i * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = values[i][n].x[j];
          x = fused_multiply_add(x, factor[j % 2], S::STATE_UNIT ? dv.x[j] * dv_factor : dv.x[j]);
        }
      }
    }
  }

  /// From dU^T to the A fragments of -dU^T W. In 16 bits they fit into registers; in fp32 they take
  /// dv_local's place in shared memory, where every lane puts back what it read, so that the update
  /// is a loop and not thousands of instructions.
  WYVERN_DEVICE static void negate_gradient(Values& values, const Buffer& buffer, int first_col) {
#pragma unroll
    for (int i = 0; i < kStrips; ++i)
#pragma unroll
      for (int n = 0; n < BT / 8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = values[i][n].x[j];
          x = -x;
          if constexpr (!kHalf<T>)
            *buffer.dv.at(n * 8 + accumulator_col(j),
                          first_col + i * 16 + strip_col(accumulator_row(j))) = from_float<T>(x);
        }
  }

  /// Eight rows of scale exp(G) dO, with the scales of queries, transposed.
  WYVERN_DEVICE static Accumulator load_output_gradient(const Buffer& buffer, int row, int col,
                                                        float scale) {
    Accumulator accumulator = load_transposed(buffer.dO, row, col);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = row + accumulator_col(j);
      float factor = scale;
      if constexpr (S::SCALAR_GATE) factor *= decay(buffer.G[r]);
      if constexpr (kScaledKeys) factor *= buffer.q_rstd[r];
      const float x = accumulator.x[j] * factor;
      accumulator.x[j] = kScaledKeys ? within_range<T>(x) : x;
    }
    return accumulator;
  }

  /// dS^T <- exp(G_C) dS^T + scale (exp(G) dO)^T Q - dU^T W, after negate_gradient; without the
  /// part of dO where there are no `outputs`.
  WYVERN_DEVICE static void update_state(State& state, const Values& values, const Buffer& buffer,
                                         int first_col, int last, float scale, bool outputs) {
    if constexpr (S::SCALAR_GATE) decay_state<false>(state, buffer.G + last);
    if constexpr (S::VECTOR_GATE) decay_state<true>(state, buffer.Gk_end);
#pragma unroll(kHalf<T> ? BT / 16 : 1)
    for (int step = 0; step < BT / kDepth<T>; ++step) {
      const int row = step * kDepth<T>;
      FragmentA<T> a[kStrips];
      if (outputs) {
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          const int col = first_col + i * 16;
          const Accumulator first = load_output_gradient(buffer, row, col, scale);
          if constexpr (kHalf<T>)
            a[i] = fragment_a<T>(first, load_output_gradient(buffer, row + 8, col, scale));
          else
            a[i] = fragment_a<T>(first, first);
        }
        add_rows<S::precision>(state, a, buffer.q, step);
      }
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        if constexpr (kHalf<T>) {
          a[i] = fragment_a<T>(values[i], step);
        } else {
          const Accumulator dU = load_transposed(buffer.dv, row, first_col + i * 16);
          a[i] = fragment_a<T>(dU, dU);
        }
      }
      add_rows<S::precision>(state, a, buffer.w, step);
    }
  }

  /// Starts copying a chunk's rows, which start at `token`; no q, dO and dv_local without values.
  WYVERN_DEVICE static void load_chunk(const Buffer& buffer, const Inputs& in, int64 token,
                                       int rows, int head, const StateColumns& columns) {
    const int64 row = token * in.e.HV + head;
    const int key = Block::key_head(head, in.e);
    const int value_rows = columns.values ? rows : 0;
    const int cols = columns_from(columns.first);
    load_tile<kThreads, K>(buffer.k, in.k.at(token, key * K), rows, K);
    load_tile<kThreads, V>(buffer.dv, in.dv_local + row * V + columns.first, int64{in.e.HV} * V,
                           value_rows, cols);
    if constexpr (S::SCALAR_GATE) load_column<kThreads, BT>(buffer.G, in.G + row, in.e.HV, rows);
    if constexpr (S::VECTOR_GATE)
      load_column<kThreads, kPaddedK>(buffer.Gk_end, in.Gk + (row + int64{rows - 1} * in.e.HV) * K,
                                      1, K);
    if constexpr (kScaledKeys) {
      load_column<kThreads, BT>(buffer.q_rstd, in.q_rstd + token * in.e.H + key, in.e.H, rows);
      load_column<kThreads, BT>(buffer.k_rstd, in.k_rstd + token * in.e.H + key, in.e.H, rows);
    }
    load_tile<kThreads, V>(buffer.dO, in.dO.at(token, head * V + columns.first), value_rows, cols);
    load_tile<kThreads, K>(buffer.q, in.q.at(token, key * K), value_rows, K);
    load_tile<kThreads, K>(buffer.w, in.w + row * K, int64{in.e.HV} * K, rows, K);
  }

  /// Updates `state` by the chunks of the range, last to first. `begin` sets it, once the first
  /// loads have started; `before(chunk, state)` sees the gradient of the state that leaves each
  /// chunk, `found(chunk, rows, values)` the chunk's dU^T.
  template <class Begin, class Before, class Found>
  WYVERN_DEVICE static void scan_chunks(unsigned char* shared, State& state, const Inputs& in,
                                        const ScanRange& range, const StateColumns& columns,
                                        Begin&& begin, Before&& before, Found&& found) {
    const int chunks = ceil_div(range.tokens, BT);
    const int warp_col = Block::warp_column();
    const auto load = [&](int step) {
      if (step < chunks) {
        const int first = (chunks - 1 - step) * BT;
        load_chunk(Buffer(shared, step), in, range.token + first, smaller(range.tokens - first, BT),
                   range.head, columns);
      }
      copy_async_commit();
    };
    for (int i = 0; i < S::num_stages - 1; ++i) load(i);
    begin();
    for (int step = 0; step < chunks; ++step) {
      if constexpr (S::num_stages == 1) {
        if (step > 0) sync_block();
        load(step);
      }
      copy_async_wait<larger(S::num_stages - 2, 0)>();
      sync_block();
      if constexpr (S::num_stages > 1) load(step + S::num_stages - 1);
      const Buffer buffer(shared, step);
      const int chunk = chunks - 1 - step;
      const int rows = smaller(range.tokens - chunk * BT, BT);
      Values values;
      before(chunk, state);
      value_gradient(values, state, buffer, warp_col, rows - 1, in.dv_factor);
      found(chunk, rows, values);
      negate_gradient(values, buffer, warp_col);
      update_state(state, values, buffer, warp_col, rows - 1, in.scale, columns.values);
    }
  }
};

}  // namespace wyvern::cuda
