// Reverse sums of the gradient of G and the backward pass of the gate per key channel, one block a
// chunk and value head.
#include "device/cuda/gate_backward.cuh"

constexpr int kThreads = num_warps * 32;
using Shape = ColumnShape<kThreads, BT, K>;

WYVERN_KERNEL(kThreads, 0) {
  const int slot = block_index() / e.HV;
  const int head = block_index() % e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  const int64 start = (chunk.token * e.HV + head) * K;
  vector_gate_backward<Shape, HAS_A_LOG, HAS_DT_BIAS, LOWER_BOUND>(
      shared_memory(), {g, g_stride}, A_log, dt_bias, dg_raw, dA_part, dbias_part, e, slot, head,
      chunk, [&](ColumnTile<Shape>& dg, const ColumnPlace<Shape>& at) {
        log_decay_gradient(dg, dG + start, G + start, e.HV * K, e.gate_floor, chunk, at);
      });
}
