// The gate per key channel and its running sum, one block a chunk and a group of columns.
#include "device/cuda/columns.cuh"

constexpr int kThreads = num_warps * 32;
using Shape = ColumnShape<kThreads, BT, HV * K, K>;

WYVERN_KERNEL(kThreads, 0) {
  const Chunk chunk =
      locate_chunk<VARLEN, BT>(block_index() / Shape::kGroups, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const ColumnPlace<Shape> at(block_index() % Shape::kGroups, shared_memory());
  const int64 start = chunk.token * (HV * K);
  ColumnTile<Shape> tile;
  tile.load(g + chunk.token * g_stride, g_stride, chunk, at);
  apply_gate<HAS_A_LOG, HAS_DT_BIAS, LOWER_BOUND, K>(tile, A_log, dt_bias, e.lower_bound, at);
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) tile.x[i][j] = maximum(tile.x[i][j], e.gate_floor);
  sum_forward(tile, at);
  tile.store(G + start, HV * K, chunk, at);
}
