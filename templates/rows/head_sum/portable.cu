// The sum over a head's value heads: a row of K elements to a power of two of lanes.
#include "device/cuda/rows.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kLanes = RowShape<DTYPE, K>::kLanes;

WYVERN_KERNEL(kThreads, 0) {
  const int64 row = int64{block_index()} * (kThreads / kLanes) + thread_index() / kLanes;
  const bool active = row < e.B * e.T * e.H;
  RowPart<DTYPE, K> sum;
  add_rows<GROUP>(sum, dy_heads + row * (GROUP * K), active);
  sum.store(dy + row * K, active);
}
