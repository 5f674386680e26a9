// The gate per key channel, a block ROWS tokens and a group of columns.
#include "device/cuda/columns.cuh"

constexpr int kThreads = num_warps * 32;
using Shape = ColumnShape<kThreads, ROWS, HV * K, K>;

WYVERN_KERNEL(kThreads, 0) {
  const int64 first = int64{block_index() / Shape::kGroups} * ROWS;
  const int64 left = e.B * e.T - first;
  const Chunk rows{first, left < ROWS ? static_cast<int>(left) : ROWS};
  const ColumnPlace<Shape> at(block_index() % Shape::kGroups);
  ColumnTile<Shape> tile;
  tile.load(g + first * g_stride, g_stride, rows, at);
  apply_gate<HAS_A_LOG, HAS_DT_BIAS, LOWER_BOUND, K>(tile, A_log, dt_bias, e.lower_bound, at);
  tile.store(g_log + first * (HV * K), HV * K, rows, at);
}
