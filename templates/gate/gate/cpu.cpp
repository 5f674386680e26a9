// The gate over ROWS tokens, all heads side by side in vectors.
#include "device/cpu/gate.hpp"

WYVERN_BLOCK {
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < e.B * e.T ? first + ROWS : e.B * e.T;
  for_heads(HV, [&](int head, int count) {
    const HeadGate gate = load_gate<HAS_DT_BIAS>(A_log, dt_bias, head, count);
    for (int64 token = first; token < end; ++token) {
      const int64 at = token * HV + head;
      store_heads(g_log + at, apply(gate, load_heads(g + at, count)), count);
    }
  });
}
