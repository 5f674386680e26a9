// Gradients of rows of o that were normalized and gated: one part of them, and its part of the
// weight's gradient.
#include "device/cpu/gate.hpp"

WYVERN_BLOCK {
  const int64 total = e.B * e.T * e.HV;
  const int64 first = block[0] * kNormPartRows;
  const int64 end = first + kNormPartRows < total ? first + kNormPartRows : total;
  float* const part = dnorm_weight_part + block[0] * V;
  for_heads(V, [&](int c, int count) { store_heads(part + c, f32{}, count); });
  for (int64 row = first; row < end; ++row) {
    const int64 token = row / e.HV, column = row % e.HV * V;
    const DTYPE* const dy = dO + token * dO_stride + column;
    const DTYPE* const in = o_raw + row * V;
    const DTYPE* const gate = norm_gate + token * norm_gate_stride + column;
    DTYPE* const din = do_raw + row * V;
    DTYPE* const dgate = dnorm_gate + token * dnorm_gate_stride + column;
    // The gradient behind the gate, in front of the weight.
    const auto behind_weight = [&](int c, int count) {
      const f32 z = load_heads(gate + c, count);
      const f32 open = NORM_SILU ? z * sigmoid(z) : sigmoid(z);
      return load_heads(dy + c, count) * open;
    };
    f32 squares{}, products{};
    for_heads(V, [&](int c, int count) {
      const f32 x = load_heads(in + c, count);
      squares += x * x;
      products += behind_weight(c, count) * load_heads(norm_weight + c, count) * x;
    });
    const float rstd = 1.0F / __builtin_sqrtf(sum(squares) / V + e.norm_eps);
    const float along = sum(products) * rstd / V;
    for_heads(V, [&](int c, int count) {
      const f32 x = load_heads(in + c, count) * rstd, z = load_heads(gate + c, count);
      const f32 weight = load_heads(norm_weight + c, count);
      const f32 open = sigmoid(z), closed = sigmoid(-z);
      const f32 slope = NORM_SILU ? open * (1.0F + z * closed) : open * closed;
      const f32 d = behind_weight(c, count);
      store_heads(din + c, (d * weight - x * along) * rstd, count);
      store_heads(dgate + c, load_heads(dy + c, count) * weight * x * slope, count);
      store_heads(part + c, load_heads(part + c, count) + d * x, count);
    });
  }
}
