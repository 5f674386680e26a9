// Sums over the parts of tensors [parts, columns], a block BC columns: its threads take every so
// many-th part each, then the lanes of a warp and the warps of the block add up in order.
#pragma once

#include "device/cuda/part_sums_layout.hpp"
#include "device/cuda/tile.cuh"

namespace wyvern::cuda {

/// With vectors of kVector columns, a divisor of their number.
template <class S, int kVector>
WYVERN_DEVICE void sum_part_vectors(const float* parts, float* sums, int tile, int columns,
                                    int64 count) {
  constexpr PartSumsLayout<S> kLayout{S{}};
  constexpr int BC = S::BC, kWarps = S::num_warps;
  constexpr int kLanes = BC / kVector;
  constexpr int kStep = kWarps * 32 / kLanes;
  const int lane = thread_index() % kLanes;
  const int column = tile * BC + lane * kVector;
  const int64 end = column < columns ? count : 0;
  float sum[kVector] = {};
#pragma unroll 4
  for (int64 i = thread_index() / kLanes; i < end; i += kStep) {
    const auto part = load<kVector>(parts + i * columns + column);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] += part.at[j];
  }
  float* const totals = array_at<kLayout.totals>(shared_memory());
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
#pragma unroll
    for (int mask = kLanes; mask < 32; mask *= 2) sum[j] += shuffle_xor(sum[j], mask);
    if (lane_index() < kLanes) totals[warp_index() * BC + lane * kVector + j] = sum[j];
  }
  sync_block();
  const int own = tile * BC + thread_index();
  if (thread_index() >= BC || own >= columns) return;
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += totals[warp * BC + thread_index()];
  sums[own] = total;
}

/// Columns from tile * BC on of `count` parts.
template <class S>
WYVERN_DEVICE void sum_parts(const float* parts, float* sums, int tile, int columns, int64 count) {
  if (columns % 4 == 0)
    sum_part_vectors<S, 4>(parts, sums, tile, columns, count);
  else if (columns % 2 == 0)
    sum_part_vectors<S, 2>(parts, sums, tile, columns, count);
  else
    sum_part_vectors<S, 1>(parts, sums, tile, columns, count);
}

}  // namespace wyvern::cuda
