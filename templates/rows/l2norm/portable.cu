// y = x / sqrt(sum(x^2) + 1e-6): a row of K elements to a power of two of lanes.
#include "device/cuda/rows.cuh"

constexpr int kThreads = num_warps * 32;
using Shape = RowShape<DTYPE, K>;
constexpr int kVector = Shape::kVector;
constexpr int kPerRow = Shape::kPerRow;
constexpr int kLanes = Shape::kLanes;
constexpr int kPerLane = Shape::kPerLane;

WYVERN_KERNEL(kThreads, 0) {
  const int64 row = int64{block_index()} * (kThreads / kLanes) + thread_index() / kLanes;
  const bool active = row < e.B * e.T * e.H;
  const int lane = thread_index() % kLanes;
  const DTYPE* const from = row_of_head<K>(x, x_stride, row, e.H);
  Vector<DTYPE, kVector> in[kPerLane] = {};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int vector = i * kLanes + lane;
    if (!active || vector >= kPerRow) continue;
    in[i] = load<kVector>(from + vector * kVector);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float value = to_float(in[i].at[j]);
      sum = fused_multiply_add(value, value, sum);
    }
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  const float factor = reciprocal_sqrt(sum + 1e-6f);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int vector = i * kLanes + lane;
    if (!active || vector >= kPerRow) continue;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      in[i].at[j] = from_float<DTYPE>(to_float(in[i].at[j]) * factor);
    store_vector(y + row * K + vector * kVector, in[i]);
  }
}
