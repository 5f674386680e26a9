// Reverse sums of the gradient of G, one block a chunk and a group of columns.
#include "device/cuda/gate_backward.cuh"

constexpr int kThreads = num_warps * 32;
using Shape = ColumnShape<kThreads, BT, GATE_HEADS>;

WYVERN_KERNEL(kThreads, 0) {
  const Chunk chunk =
      locate_chunk<VARLEN, BT>(block_index() / Shape::kGroups, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const ColumnPlace<Shape> at(block_index() % Shape::kGroups, shared_memory());
  const int64 start = chunk.token * GATE_HEADS;
  ColumnTile<Shape> tile;
  log_decay_gradient(tile, dG + start, G + start, GATE_HEADS, e.gate_floor, chunk, at);
  tile.store(dg + start, GATE_HEADS, chunk, at);
}
