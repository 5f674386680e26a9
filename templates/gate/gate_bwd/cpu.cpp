// The backward pass of the gate over one chunk, all heads side by side in vectors.
#include "device/cpu/gate.hpp"

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[0], BT, e, seq_offsets, chunk_index);
  for_heads(HV, [&](int head, int count) {
    const int64 start = chunk.token * HV + head;
    const GateColumns gate{gate_rate<false>(load_heads(A_log + head, count)),
                           HAS_DT_BIAS ? load_heads(dt_bias + head, count) : f32{}};
    const auto gradient = [&](int r) { return load_heads(dg_log + start + int64{r} * HV, count); };
    const GateSlopes sums = gate_backward<false>(rows_in(chunk, g, g_stride, head), dg_raw + start,
                                                 HV, chunk.rows, count, gate, 0.0F, gradient);
    store_heads(dA_part + block[0] * HV + head, sums.by_A_log, count);
    if constexpr (HAS_DT_BIAS) store_heads(dbias_part + block[0] * HV + head, sums.by_x, count);
  });
}
