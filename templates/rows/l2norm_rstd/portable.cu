// rstd = 1 / sqrt(sum(x^2) + 1e-6): a row of K elements to a power of two of lanes.
#include "device/cuda/rows.cuh"

constexpr int kThreads = num_warps * 32;
using Shape = RowShape<DTYPE, K>;
constexpr int kVector = Shape::kVector;
constexpr int kPerRow = Shape::kPerRow;
constexpr int kLanes = Shape::kLanes;

WYVERN_KERNEL(kThreads, 0) {
  const int64 row = int64{block_index()} * (kThreads / kLanes) + thread_index() / kLanes;
  const bool active = row < e.B * e.T * e.H;
  const int lane = thread_index() % kLanes;
  const DTYPE* const from = row_of_head<K>(x, x_stride, row, e.H);
  float sum = 0.0f;
#pragma unroll
  for (int first = 0; first < kPerRow; first += kLanes) {
    if (!active || first + lane >= kPerRow) continue;
    const auto in = load<kVector>(from + (first + lane) * kVector);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float value = to_float(in.at[j]);
      sum = fused_multiply_add(value, value, sum);
    }
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (active && lane == 0) rstd[row] = reciprocal_sqrt(sum + 1e-6f);
}
