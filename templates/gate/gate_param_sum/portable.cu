// Sums over chunk slots, a block BC columns: its threads take every so many-th slot each, then the
// lanes of a warp and the warps of the block add up in order.
#include "device/cuda/tile.cuh"
#include "gate/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr gate_param_sum::SharedLayout kLayout{Spec{}};

template <int Columns>
WYVERN_DEVICE void sum_columns(const float* parts, float* sums, int tile, int64 slots) {
  constexpr int kVector = Columns % 4 == 0 ? 4 : Columns % 2 == 0 ? 2 : 1;
  constexpr int kLanes = BC / kVector;
  constexpr int kStep = kThreads / kLanes;
  const int lane = thread_index() % kLanes;
  const int column = tile * BC + lane * kVector;
  const int64 end = column < Columns ? slots : 0;
  float sum[kVector] = {};
#pragma unroll 4
  for (int64 slot = thread_index() / kLanes; slot < end; slot += kStep) {
    const auto part = load<kVector>(parts + slot * Columns + column);
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
  if (thread_index() >= BC || own >= Columns) return;
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < num_warps; ++warp) total += totals[warp * BC + thread_index()];
  sums[own] = total;
}

WYVERN_KERNEL(kThreads, 0) {
  constexpr int kHeadTiles = HAS_A_LOG ? ceil_div(HV, BC) : 0;
  if (block_index() < kHeadTiles)
    sum_columns<HV>(dA_part, dA_log, block_index(), e.NT);
  else
    sum_columns<GATE_HEADS>(dbias_part, ddt_bias, block_index() - kHeadTiles, e.NT);
}
