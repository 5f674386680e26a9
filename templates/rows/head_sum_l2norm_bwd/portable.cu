// The sum over a head's value heads and the gradient of x from it: a row of K elements to a power
// of two of lanes.
#include "device/cuda/rows.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kLanes = RowShape<DTYPE, K>::kLanes;

WYVERN_KERNEL(kThreads, 0) {
  const int64 row = int64{block_index()} * (kThreads / kLanes) + thread_index() / kLanes;
  const bool active = row < e.B * e.T * e.H;
  RowPart<DTYPE, K> in, gradient;
  in.add(row_of_head<K>(x, x_stride, row, e.H), active);
  add_rows<GROUP>(gradient, dy_heads + row * (GROUP * K), active);
  l2norm_gradient(in, active ? rstd[row] : 0.0f, gradient);
  gradient.store(dx + row * K, active);
}
