// Rows of a chunk between a tensor and swizzled tiles, by TMA, where a sequence may end in a chunk.
#pragma once

#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/tile.cuh"
#include "device/cuda/token_rows.cuh"

namespace wyvern::cuda::sm90 {

/// Loads `bytes` of a chunk of Rows rows by load(barrier), by one warp, and completes `full`, which
/// takes 32 arrivals. Of fewer rows the loads complete `tail` in that phase; then clear() clears
/// the others, which belong to the next sequence.
template <int Rows, class Load, class Clear>
WYVERN_DEVICE void load_rows(int rows, Barrier* full, Barrier* tail, uint32 phase, int bytes,
                             Load&& load, Clear&& clear) {
  Barrier* const barrier = rows < Rows ? tail : full;
  if (lane_index() > 0 && rows == Rows) barrier_arrive(full);
  if (lane_index() == 0) {
    barrier_arrive_expect(barrier, bytes);
    load(barrier);
  }
  if (rows == Rows) return;
  barrier_wait(barrier, phase);
  clear();
  hand_over(full);
}

/// Stores a chunk's rows of 64 columns of a head from a tile, by a warpgroup that has written it
/// and synchronized: by a TMA store, or row by row where the sequence ends in the chunk. A head has
/// `width` columns.
template <class T>
WYVERN_DEVICE void store_rows(const TensorMap& map, const TokenRows<T>& to,
                              const SwizzledTile<T, 64, 64>& tile, int64 token, int rows, int panel,
                              int head, int width) {
  const int thread = thread_index() % 128;
  if (rows == 64) {
    if (thread > 0) return;
    tensor_store(map, {0, static_cast<int>(token), panel, head}, tile.data);
    bulk_commit();
    return;
  }
#pragma unroll 1
  for (int i = thread; i < rows * 8; i += 128)
    store_vector(to.row(token + i / 8) + int64{head} * width + panel * 64 + i % 8 * 8,
                 load<8>(tile.at(i / 8, i % 8 * 8)));
}

}  // namespace wyvern::cuda::sm90
