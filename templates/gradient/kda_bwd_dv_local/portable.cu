// dv_local = scale Aqk^T dO, one block BV value columns of one chunk and value head. A warp owns
// 16-row strips of the result, or with more warps than strips a share of their columns.
#include "device/cuda/chunk.cuh"
#include "device/cuda/mma.cuh"
#include "device/state_unit.hpp"
#include "gradient/kda_bwd_dv_local/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kStrips = larger(BT / 16 / num_warps, 1);  // per warp
constexpr int kWarpsDown = BT / 16 / kStrips;
constexpr int kCols = BV / (num_warps / kWarpsDown);  // per warp
constexpr int kTilesV = ceil_div(V, BV);

constexpr kda_bwd_dv_local::SharedLayout kLayout{Spec{}};

/// An accumulator's part of the transpose of `x`: its rows are x's sixteen columns from `col`, its
/// columns x's eight rows from `row`.
WYVERN_DEVICE Accumulator load_transposed(const Tile<float, BT, BT>& x, int row, int col) {
  Accumulator accumulator;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    accumulator.x[i] = *x.at(row + accumulator_col(i), col + accumulator_row(i));
  return accumulator;
}

WYVERN_KERNEL(kThreads, 0) {
  const int first_v = block_index() % kTilesV * BV;
  const int head = block_index() / kTilesV % e.HV;
  const int slot = block_index() / kTilesV / e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * e.HV + head;
  const auto dO_chunk = rows_in(chunk, dO, dO_stride, head * V);

  const auto scores = tile_at<kLayout.scores>(shared_memory());
  const auto gradients = tile_at<kLayout.gradients>(shared_memory());
  load_tile<kThreads, BT>(scores, Aqk + row * BT, e.HV * BT, chunk.rows, BT);
  load_tile<kThreads, V>(gradients, dO_chunk.at(0, first_v), chunk.rows, V - first_v);
  copy_async_commit();
  copy_async_wait<0>();
  sync_block();

  const int first_strip = warp_index() % kWarpsDown;
  const int first_col = warp_index() / kWarpsDown * kCols;
  Accumulator out[kStrips][kCols / 8];
#pragma unroll
  for (int step = 0; step < BT / kDepth<DTYPE>; ++step) {
    const int depth = step * kDepth<DTYPE>;
    if (depth + kDepth<DTYPE> <= first_strip * 16) continue;
    // As in kda_fwd_o, Aqk enters as head and rest.
    FragmentA<DTYPE> a[kStrips], rest[kStrips];
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      const int col = (first_strip + i * kWarpsDown) * 16;
      Accumulator accumulators[kDepth<DTYPE> / 8];
#pragma unroll
      for (int n = 0; n < kDepth<DTYPE> / 8; ++n)
        accumulators[n] = load_transposed(scores, depth + n * 8, col);
      a[i] = fragment_a<DTYPE>(accumulators, 0);
      if constexpr (kHalf<DTYPE>) rest[i] = fragment_a_rest(accumulators, 0, a[i]);
    }
#pragma unroll
    for (int n = 0; n < kCols / 8; n += 2) {
      const auto b = load_b(gradients, depth, first_col + n * 8);
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        if constexpr (kHalf<DTYPE>) multiply<precision>(out[i][n], out[i][n + 1], rest[i], b);
        multiply<precision>(out[i][n], out[i][n + 1], a[i], b);
      }
    }
  }

  const float scale = e.scale / unit_of_gradients<Spec>(e);
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    const int first_row = (first_strip + i * kWarpsDown) * 16;
    DTYPE* const to = dv_local + (row + int64{first_row} * e.HV) * V + first_v + first_col;
#pragma unroll
    for (int n = 0; n < kCols / 8; n += 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        out[i][n].x[j] *= scale;
        out[i][n + 1].x[j] *= scale;
      }
      store_pair<V>(to + n * 8, e.HV * V, out[i][n], out[i][n + 1], chunk.rows - first_row,
                    V - first_v - first_col - n * 8);
    }
  }
}
