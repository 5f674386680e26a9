// The backward pass of the gate, one block a chunk and a group of heads.
#include "device/cuda/gate_backward.cuh"

constexpr int kThreads = num_warps * 32;
using Shape = ColumnShape<kThreads, BT, HV>;

WYVERN_KERNEL(kThreads, 0) {
  const int slot = block_index() / Shape::kGroups;
  const Chunk chunk = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  const ColumnPlace<Shape> at(block_index() % Shape::kGroups, shared_memory());
  const int64 start = chunk.token * HV;
  ColumnTile<Shape> dg;
  dg.load(dg_log + start, HV, chunk, at);
  scalar_gate_backward<HAS_DT_BIAS>(dg, {g, g_stride}, A_log, dt_bias, dg_raw, dA_part, dbias_part,
                                    slot, chunk, at);
}
