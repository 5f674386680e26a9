// The gate and its running sum over one chunk, all heads side by side in vectors.
#include "device/cpu/gate.hpp"

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[0], BT, e, seq_offsets, chunk_index);
  const f32 floor = splat(e.gate_floor);
  for_heads(HV, [&](int head, int count) {
    const HeadGate gate = load_gate<HAS_DT_BIAS>(A_log, dt_bias, head, count);
    f32 sum{};
    for (int r = 0; r < chunk.rows; ++r) {
      const int64 token = chunk.token + r;
      sum += at_least(apply(gate, load_heads(g + token * g_stride + head, count)), floor);
      store_heads(G + token * HV + head, sum, count);
    }
  });
}
