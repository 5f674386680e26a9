// The backward pass of the gate per key channel over one chunk of one head.
#include "device/cpu/gate.hpp"

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[0], BT, e, seq_offsets, chunk_index);
  const int64 stride = int64{e.HV} * K;
  const int64 part = block[0] * e.HV + block[1];
  f32 dA{};
  for_heads(K, [&](int key, int count) {
    const int64 start = chunk.token * stride + block[1] * K + key;
    const auto gate = load_columns<LOWER_BOUND, HAS_A_LOG, HAS_DT_BIAS>(A_log, block[1], dt_bias,
                                                                        block[1] * K + key, count);
    const auto gradient = [&](int r) { return load_heads(dg_log + start + r * stride, count); };
    const GateSlopes sums =
        gate_backward<LOWER_BOUND>(rows_in(chunk, g, g_stride, block[1] * K + key), dg_raw + start,
                                   stride, chunk.rows, count, gate, e.lower_bound, gradient);
    dA += sums.by_A_log;
    if constexpr (HAS_DT_BIAS) store_heads(dbias_part + part * K + key, sums.by_x, count);
  });
  if constexpr (HAS_A_LOG) dA_part[part] = sum(dA);
}
