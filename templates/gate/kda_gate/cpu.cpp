// The gate per key channel over ROWS tokens of one head.
#include "device/cpu/gate.hpp"

WYVERN_BLOCK {
  const int64 first = block[0] * ROWS, head = block[1];
  const int64 end = first + ROWS < e.B * e.T ? first + ROWS : e.B * e.T;
  for_heads(K, [&](int key, int count) {
    const auto gate = load_columns<LOWER_BOUND, HAS_A_LOG, HAS_DT_BIAS>(A_log, head, dt_bias,
                                                                        head * K + key, count);
    for (int64 token = first; token < end; ++token) {
      const int64 at = (token * HV + head) * K + key;
      const f32 x = load_heads(g + token * g_stride + head * K + key, count) + gate.bias;
      store_heads(g_log + at, log_decay<LOWER_BOUND>(x, gate.rate, e.lower_bound), count);
    }
  });
}
