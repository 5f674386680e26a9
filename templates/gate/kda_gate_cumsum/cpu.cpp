// The gate per key channel and its running sum over one chunk of one head.
#include "device/cpu/gate.hpp"

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[0], BT, e, seq_offsets, chunk_index);
  const int64 head = block[1];
  const f32 floor = splat(e.gate_floor);
  for_heads(K, [&](int key, int count) {
    const auto gate = load_columns<LOWER_BOUND, HAS_A_LOG, HAS_DT_BIAS>(A_log, head, dt_bias,
                                                                        head * K + key, count);
    f32 sum{};
    for (int r = 0; r < chunk.rows; ++r) {
      const int64 token = chunk.token + r, at = (token * HV + head) * K + key;
      const f32 x = load_heads(g + token * g_stride + head * K + key, count) + gate.bias;
      sum += at_least(log_decay<LOWER_BOUND>(x, gate.rate, e.lower_bound), floor);
      store_heads(G + at, sum, count);
    }
  });
}
