// The states at the borders of segments, in order: S <- M S + R, all in fp32.
#pragma once

#include "device/cuda/mma.cuh"
#include "device/cuda/scan_layout.hpp"
#include "device/cuda/segment.cuh"

namespace wyvern::cuda {

/// One block BV columns of the state of one sequence and value head. S is the kernel's Spec.
template <class S>
struct SegmentCombine {
  static constexpr int HV = S::HV, K = S::K, V = S::V, BV = S::BV, BK = S::BK;
  static constexpr int kThreads = S::num_warps * 32;
  static constexpr int kPaddedK = padded(K);
  static constexpr int kTilesV = ceil_div(V, BV);
  static constexpr int kTilesM = ceil_div(K, BK);  // of BK rows of M, sixteen a warp
  static constexpr CombineLayout<S> kLayout{S{}};

  using State = TileAt<kLayout.even_state>;  // transposed
  using Rows = TileAt<kLayout.even_rows>;    // of M

  /// Calls visit(k, v, element, whether the tensor has it) for the block's columns of a state.
  template <class Visit>
  WYVERN_DEVICE static void for_each_element(const State& state, int tile_v, Visit&& visit) {
    for (int i = thread_index(); i < kPaddedK * BV; i += kThreads) {
      const int k = i / BV;
      const int v = tile_v + i % BV;
      visit(k, v, *state.at(i % BV, k), k < K && v < V);
    }
  }

  /// Elements of R that this thread adds to a product of one tile's rows.
  struct Residual {
    float x[BV / 16][8];

    /// The element's row of M and column of V.
    WYVERN_DEVICE static int row(int tile_m, int j) {
      return tile_m * BK + warp_index() * 16 + j / 4 * 8 + accumulator_col(j % 4);
    }
    WYVERN_DEVICE static int column(int i, int j) { return i * 16 + accumulator_row(j % 4); }

    WYVERN_DEVICE void fetch(const float* R, int tile_m, int tile_v) {
#pragma unroll
      for (int i = 0; i < BV / 16; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int k = row(tile_m, j);
          const int v = tile_v + column(i, j);
          x[i][j] = k < K && v < V ? R[int64{k} * V + v] : 0.0f;
        }
    }
  };

  /// Rows of one tile of M, times the state, plus R: columns of the next state.
  WYVERN_DEVICE static void apply_rows(const State& next, const State& state, const Rows& m,
                                       const Residual& residual, int tile_m) {
    const int first = warp_index() * 16;
    Accumulator sum[BV / 16][2];
#pragma unroll
    for (int depth = 0; depth < kPaddedK; depth += kDepth<float>) {
      const FragmentB<float> b = load_b_transposed(m, depth, first);
#pragma unroll
      for (int i = 0; i < BV / 16; ++i)
        multiply<S::precision>(sum[i][0], sum[i][1], load_a(state, i * 16, depth), b);
    }
#pragma unroll
    for (int i = 0; i < BV / 16; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int k = Residual::row(tile_m, j);
        if (k < kPaddedK)
          *next.at(Residual::column(i, j), k) = sum[i][j / 4].x[j % 4] + residual.x[i][j];
      }
  }

  /// Walks the segments of the block's sequence, forwards or backwards: writes the state at each
  /// one's near border and takes it through the segment. `begin(sequence, head, k, v)` is the state
  /// at the start.
  template <bool Backwards, class Begin>
  WYVERN_DEVICE static void walk(unsigned char* shared, const float* segment_M,
                                 const float* segment_R, const int32* seq_offsets,
                                 float* segment_state, const Extents& e, Begin&& begin) {
    constexpr int kLength = S::SEG * S::BT;
    const int tile_v = block_index() % kTilesV * BV;
    const int head = block_index() / kTilesV % HV;
    const int sequence = block_index() / kTilesV / HV;
    const int tokens =
        S::VARLEN ? seq_offsets[sequence + 1] - seq_offsets[sequence] : static_cast<int>(e.T);
    const int segments = larger(ceil_div(tokens, kLength), 1);
    const int64 first = first_segment<S::VARLEN, kLength>(sequence, e, seq_offsets);
    const auto slot_of = [&](int step) {
      return (first + (Backwards ? segments - 1 - step : step)) * HV + head;
    };

    const State states[2] = {tile_at<kLayout.even_state>(shared),
                             tile_at<kLayout.odd_state>(shared)};
    const Rows rows[2] = {tile_at<kLayout.even_rows>(shared), tile_at<kLayout.odd_rows>(shared)};
    const int loads = (segments - 1) * kTilesM;
    const auto load = [&](int i) {
      if (i < loads) {
        const int row = i % kTilesM * BK;
        load_tile<kThreads, K>(rows[i % 2], segment_M + (slot_of(i / kTilesM) * K + row) * K, K,
                               K - row, K);
      }
      copy_async_commit();
    };
    load(0);
    for_each_element(states[0], tile_v, [&](int k, int v, float& x, bool inside) {
      x = inside ? begin(sequence, head, k, v) : 0.0f;
    });
    for (int step = 0; step < segments; ++step) {
      const int64 slot = slot_of(step);
      sync_block();
      for_each_element(states[step % 2], tile_v, [&](int k, int v, float& x, bool inside) {
        if (inside) segment_state[(slot * K + k) * V + v] = x;
      });
      if (step == segments - 1) break;
      for (int tile = 0; tile < kTilesM; ++tile) {
        const int i = step * kTilesM + tile;
        // On its way while the tile is waited for.
        Residual residual;
        residual.fetch(segment_R + slot * K * V, tile, tile_v);
        copy_async_wait<0>();
        sync_block();
        load(i + 1);
        apply_rows(states[(step + 1) % 2], states[step % 2], rows[i % 2], residual, tile);
      }
    }
  }
};

}  // namespace wyvern::cuda
