// The gate and its running sum, one block a chunk and up to 32 heads.
#include "device/cuda/gate.cuh"
#include "gate/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr cumsum::SharedLayout kLayout{Spec{}};

WYVERN_KERNEL(kThreads, 0) {
  constexpr int kGroups = CumsumShape<kThreads, BT, HV>::kGroups;
  const Chunk chunk =
      locate_chunk<VARLEN, BT>(block_index() / kGroups, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  chunk_cumsum<kThreads, BT, HV>(array_at<kLayout.totals>(shared_memory()), chunk,
                                 block_index() % kGroups, G, [&](int row, int head) {
                                   const float bias = HAS_DT_BIAS ? dt_bias[head] : 0.0f;
                                   const float x =
                                       to_float(g[(chunk.token + row) * g_stride + head]) + bias;
                                   return maximum(log_decay(x, A_log[head]), e.gate_floor);
                                 });
}
