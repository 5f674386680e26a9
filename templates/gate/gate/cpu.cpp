// The gate over ROWS tokens, all heads side by side in vectors.
#include "device/cpu/gate.hpp"

WYVERN_BLOCK {
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < e.B * e.T ? first + ROWS : e.B * e.T;
  for_heads(HV, [&](int head, int count) {
    const HeadGate gate = load_gate<HAS_DT_BIAS>(A_log, dt_bias, head, count);
    for (int64 token = first; token < end; ++token) {
      const f32 raw = load_heads(g + token * g_stride + head, count);
      store_heads(g_log + token * HV + head, apply(gate, raw), count);
    }
  });
}
