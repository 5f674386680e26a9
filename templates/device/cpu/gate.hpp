// Per-token work on [B,T,HV] tensors: the heads of a token lie side by side, a vector of them at a
// time.
#pragma once

#include "device/cpu/chunk.hpp"

namespace wyvern::cpu {

/// Calls body(first head, number of heads <= kLanes) until all heads are covered.
template <class Body>
inline void for_heads(int heads, Body body) {
  for (int head = 0; head < heads; head += kLanes)
    body(head, heads - head < kLanes ? heads - head : kLanes);
}

template <class T>
inline f32 load_heads(const T* p, int count) {
  return count == kLanes ? load(p) : load_part(p, count);
}
template <class T>
inline void store_heads(T* p, f32 v, int count) {
  if (count == kLanes)
    store(p, v);
  else
    store_part(p, v, count);
}

/// exp(A_log), clamped to be finite, so that its product with 0 is 0: a bounded gate's input below
/// 1e-28 is 0 then, and dt_bias may be large.
template <bool Bounded>
inline f32 gate_rate(f32 A_log) {
  return at_most(exp(A_log), splat(Bounded ? 0x1p100F : 0x1p127F));
}

/// The gate's parameters of a vector of heads.
struct HeadGate {
  f32 factor;  ///< -exp(A_log)
  f32 bias;
};

template <bool Bias>
inline HeadGate load_gate(const float* A_log, const float* dt_bias, int head, int count) {
  HeadGate gate{-gate_rate<false>(load_heads(A_log + head, count)), f32{}};
  if constexpr (Bias) gate.bias = load_heads(dt_bias + head, count);
  return gate;
}

inline f32 apply(const HeadGate& gate, f32 g) { return gate.factor * softplus(g + gate.bias); }

/// The log decay of a gate's raw input x, which includes dt_bias, with rate = exp(A_log), or 1
/// without A_log: -rate softplus(x), or lower_bound sigmoid(rate x) where `Bounded`.
template <bool Bounded>
inline f32 log_decay(f32 x, f32 rate, float lower_bound) {
  if constexpr (Bounded) return sigmoid(rate * x) * lower_bound;
  return -rate * softplus(x);
}

/// The derivatives of log_decay. They are finite: where a decay is 0, its gradient is 0 times them.
struct GateSlopes {
  f32 by_x, by_A_log;
};
template <bool Bounded>
inline GateSlopes gate_slopes(f32 x, f32 rate, float lower_bound) {
  if constexpr (Bounded) {
    // sigmoid(z) (1 - sigmoid(z)), the same for z and -z
    const f32 z = rate * x;
    const f32 small = exp(z < 0.0F ? z : -z);
    const f32 slope = rate * lower_bound * (small / ((small + 1.0F) * (small + 1.0F)));
    return {slope, slope * x};
  } else {
    return {-rate * sigmoid(x), at_least(-rate * softplus(x), splat(-0x1.fffffep127F))};
  }
}

/// rate and dt_bias of a vector of a gate's columns.
struct GateColumns {
  f32 rate, bias;
};

/// For `count` keys of a vector gate's head, dt_bias from `column` on.
template <bool Bounded, bool HasALog, bool HasBias>
inline GateColumns load_columns(const float* A_log, int64 head, const float* dt_bias, int64 column,
                                int count) {
  GateColumns gate{splat(1.0F), f32{}};
  if constexpr (HasALog) gate.rate = gate_rate<Bounded>(splat(A_log[head]));
  if constexpr (HasBias) gate.bias = load_heads(dt_bias + column, count);
  return gate;
}

/// One chunk of a gate's backward pass, `count` columns of it; dg_raw has a row stride of `stride`.
/// dg_at(r) gives gradients of log decays and is called from the last row to the first. The
/// gradients of A_log and dt_bias are summed before rounding.
template <bool Bounded, class T, class Gradient>
inline GateSlopes gate_backward(const TokenRows<const T>& g, T* dg_raw, int64 stride, int rows,
                                int count, const GateColumns& gate, float lower_bound,
                                Gradient dg_at) {
  GateSlopes sums{};
  for (int r = rows - 1; r >= 0; --r) {
    const f32 x = load_heads(g.row(r), count) + gate.bias;
    const GateSlopes slopes = gate_slopes<Bounded>(x, gate.rate, lower_bound);
    const f32 dg = dg_at(r);
    const f32 raw = dg * slopes.by_x;
    store_heads(dg_raw + r * stride, raw, count);
    sums.by_x += raw;
    sums.by_A_log += dg * slopes.by_A_log;
  }
  return sums;
}

/// A sum and its rounding error.
struct ExactSum {
  f32 sum{}, lost{};

  void add(f32 x) {
    const f32 total = sum + x;
    const f32 taken = total - sum;
    lost += (sum - (total - taken)) + (x - taken);
    sum = total;
  }
  f32 value() const { return sum + lost; }
};

/// Gradients of log decays, from a chunk's last row to its first: reverse sums of dG, and 0 where
/// the floor replaced the decay. A floor of -infinity never does. Sums keep their rounding errors,
/// because g_log, a factor of the result, may be large.
struct LogDecayGradient {
  const float* dG;
  const float* G;
  int64 stride;
  int count;
  float floor;
  ExactSum total{};

  f32 operator()(int r) {
    total.add(load_heads(dG + r * stride, count));
    const f32 before = r > 0 ? load_heads(G + (r - 1) * stride, count) : f32{};
    const f32 decay = load_heads(G + r * stride, count) - before;
    return decay < 0.9999F * floor ? f32{} : total.value();
  }
};

}  // namespace wyvern::cpu
