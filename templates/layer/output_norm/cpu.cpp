// Rows of o normalized and gated, ROWS of V elements.
#include "device/cpu/gate.hpp"

WYVERN_BLOCK {
  const int64 total = e.B * e.T * e.HV;
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 row = first; row < end; ++row) {
    const int64 token = row / e.HV, column = row % e.HV * V;
    const DTYPE* const from = o_raw + row * V;
    const DTYPE* const gate = norm_gate + token * norm_gate_stride + column;
    DTYPE* const to = o + token * o_stride + column;
    f32 squares{};
    for_heads(V, [&](int c, int count) {
      const f32 x = load_heads(from + c, count);
      squares += x * x;
    });
    const f32 rstd = splat(1.0F / __builtin_sqrtf(sum(squares) / V + e.norm_eps));
    for_heads(V, [&](int c, int count) {
      const f32 x = load_heads(from + c, count), z = load_heads(gate + c, count);
      const f32 open = NORM_SILU ? z * sigmoid(z) : sigmoid(z);
      const f32 y = x * rstd * load_heads(norm_weight + c, count) * open;
      // An element that is 0 stays 0 whatever the gate is: rows of null sequences are 0, and nobody
      // wrote their gates.
      store_heads(to + c, x == 0.0F ? f32{} : y, count);
    });
  }
}
