// Sums over chunk slots, a block BC columns: its threads take every so many-th slot each, then the
// lanes of a warp and the warps of the block add up in order.
#include "device/cuda/tile.cuh"
#include "gate/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr gate_param_sum::SharedLayout kLayout{Spec{}};

/// With vectors of kVector columns, a divisor of their number.
template <int kVector>
WYVERN_DEVICE void sum_vectors(const float* parts, float* sums, int tile, int columns,
                               int64 slots) {
  constexpr int kLanes = BC / kVector;
  constexpr int kStep = kThreads / kLanes;
  const int lane = thread_index() % kLanes;
  const int column = tile * BC + lane * kVector;
  const int64 end = column < columns ? slots : 0;
  float sum[kVector] = {};
#pragma unroll 4
  for (int64 slot = thread_index() / kLanes; slot < end; slot += kStep) {
    const auto part = load<kVector>(parts + slot * columns + column);
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
  for (int warp = 0; warp < num_warps; ++warp) total += totals[warp * BC + thread_index()];
  sums[own] = total;
}

WYVERN_DEVICE void sum_columns(const float* parts, float* sums, int tile, int columns,
                               int64 slots) {
  if (columns % 4 == 0)
    sum_vectors<4>(parts, sums, tile, columns, slots);
  else if (columns % 2 == 0)
    sum_vectors<2>(parts, sums, tile, columns, slots);
  else
    sum_vectors<1>(parts, sums, tile, columns, slots);
}

WYVERN_KERNEL(kThreads, 0) {
  const int head_tiles = HAS_A_LOG ? ceil_div(e.HV, BC) : 0;
  if (block_index() < head_tiles)
    sum_columns(dA_part, dA_log, block_index(), e.HV, e.NT);
  else
    sum_columns(dbias_part, ddt_bias, block_index() - head_tiles, e.HV * GATE_K, e.NT);
}
