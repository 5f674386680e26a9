// A state in scratch, with rows of K or of V as in its tensor, and one step of the recurrence on
// it. S is the kernel's Spec: BV value columns a call. State is the tile.
#pragma once

#include "device/cpu/gate.hpp"

namespace wyvern::cpu::decode {

/// Keys in whole vectors.
template <class S>
inline constexpr int kKeys = round_up(S::K, kLanes);

/// A token's operands of a step, as fp32; 0 from K to the next whole vector.
struct Token {
  float* k;
  float* erasing;  // erase k, which reads the state where Step has Erases
  float* q;
  float* decay;  // of every key
  float* u;      // v times its weight, then u
  float kq;      // k . q
  float rate;    // beta times k_rstd
  float k_rstd, q_rstd;
};

template <class T>
static void load_vector(const T* from, int count, float* to) {
  const int whole = count / kLanes * kLanes;
  for (int c = 0; c < whole; c += kLanes) store(to + c, load(from + c));
  if (whole < count) store(to + whole, load_part(from + whole, count - whole));
}

/// to *= from.
template <class T>
static void multiply_vector(const T* from, int count, float* to) {
  const int whole = count / kLanes * kLanes;
  for (int c = 0; c < whole; c += kLanes) store(to + c, load(to + c) * load(from + c));
  if (whole < count) store(to + whole, load(to + whole) * load_part(from + whole, count - whole));
}

/// The same number for every key.
template <class S>
static void fill_keys(float* to, float x) {
  for (int c = 0; c < kKeys<S>; c += kLanes) store(to + c, splat(x));
}

template <class S>
static float dot(const float* a, const float* b) {
  f32 total{};
  for (int c = 0; c < kKeys<S>; c += kLanes) total += load(a + c) * load(b + c);
  return sum(total);
}

/// 1 / |x|, or 1 without l2norm.
template <class S>
static float norm_scale(const float* x) {
  return S::QK_L2NORM ? 1.0F / __builtin_sqrtf(dot<S>(x, x) + 1e-6F) : 1.0F;
}

/// exp of the log decay of every key: its own where `PerKey`, else the head's.
template <class S, bool PerKey, class T>
static void load_decay(const T* g, const float* A_log, const float* dt_bias, int64 head,
                       float lower_bound, float* decay) {
  f32 rate = splat(1.0F);
  if constexpr (S::GATE_IN_KERNEL && S::HAS_A_LOG)
    rate = gate_rate<S::LOWER_BOUND>(splat(A_log[head]));
  const auto of = [&](f32 x) {
    if constexpr (S::GATE_IN_KERNEL) return exp(log_decay<S::LOWER_BOUND>(x, rate, lower_bound));
    return exp(x);
  };
  if constexpr (PerKey) {
    for_heads(S::K, [&](int c, int count) {
      f32 x = load_heads(g + c, count);
      if constexpr (S::GATE_IN_KERNEL && S::HAS_DT_BIAS)
        x += load_heads(dt_bias + head * S::K + c, count);
      store(decay + c, of(x));
    });
  } else {
    float x = load_one(g);
    if constexpr (S::GATE_IN_KERNEL && S::HAS_DT_BIAS) x += dt_bias[head];
    const f32 all = of(splat(x));
    for (int c = 0; c < S::K; c += kLanes) store(decay + c, all);
  }
}

/// One step on a state of S~ = the decayed S: u = rate (v - k_rstd S~^T erasing), whose product
/// with k is added to S~; o_t = scale (S~^T q + u k.q). `Decays` and `Erases` say whether the token
/// has a decay and an erasing vector other than k.
template <class S, class State, bool Decays, bool Erases>
struct Step {
  static constexpr int kRow = State::kStride;

  static const float* erasing(const Token& t) { return Erases ? t.erasing : t.k; }

  /// `with_k` and `with_q` are the decayed state's products with the erasing key and q, unscaled.
  static f32 solve(const Token& t, f32 v, f32 with_k, f32 with_q, float scale, f32& o) {
    const f32 u = (v - with_k * t.k_rstd) * t.rate;
    o = (with_q + u * t.kq) * (scale * t.q_rstd);
    return u;
  }

  /// N vectors of value columns of a state with rows of V. `to` gets o.
  template <int N>
  static void columns(float* state, const Token& t, float* u, float scale, float* to) {
    f32 with_k[N] = {}, with_q[N] = {};
    for (int r = 0; r < S::K; ++r) {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; ++i) {
        f32 x = load(state + r * kRow + i * kLanes);
        if constexpr (Decays) x *= t.decay[r];
        with_k[i] += x * erasing(t)[r];
        with_q[i] += x * t.q[r];
      }
    }
    f32 solved[N];
#pragma clang loop unroll(full)
    for (int i = 0; i < N; ++i) {
      f32 o;
      solved[i] = solve(t, load(u + i * kLanes), with_k[i], with_q[i], scale, o);
      store(to + i * kLanes, o);
    }
    for (int r = 0; r < S::K; ++r) {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; ++i) {
        float* at = state + r * kRow + i * kLanes;
        f32 x = load(at);
        if constexpr (Decays) x *= t.decay[r];
        store(at, x + solved[i] * t.k[r]);
      }
    }
  }

  /// `count` rows of K; with_k and with_q have room for that many numbers.
  static void rows(float* state, const Token& t, int count, float* with_k, float* with_q,
                   float scale, float* o) {
    for (int v = 0; v < count; ++v) {
      float* row = state + v * kRow;
      f32 k_sum{}, q_sum{};
      for (int c = 0; c < kKeys<S>; c += kLanes) {
        f32 x = load(row + c);
        if constexpr (Decays) {
          x *= load(t.decay + c);
          store(row + c, x);
        }
        k_sum += x * load(erasing(t) + c);
        q_sum += x * load(t.q + c);
      }
      with_k[v] = sum(k_sum);
      with_q[v] = sum(q_sum);
    }
    for (int v = 0; v < count; v += kLanes) {
      f32 out;
      store(t.u + v, solve(t, load(t.u + v), load(with_k + v), load(with_q + v), scale, out));
      store(o + v, out);
    }
    for (int v = 0; v < count; ++v)
      for (int c = 0; c < kKeys<S>; c += kLanes) {
        float* at = state + v * kRow + c;
        store(at, load(at) + load(t.k + c) * t.u[v]);
      }
  }

  /// `count` value columns of the state; `o` gets the token's output.
  static void run(State state, const Token& t, int count, float* with_k, float* with_q, float scale,
                  float* o) {
    if constexpr (S::STATE_V_FIRST) return rows(state.data, t, count, with_k, with_q, scale, o);
    int c = 0;
    for (; c + 4 * kLanes <= count; c += 4 * kLanes)
      columns<4>(state.data + c, t, t.u + c, scale, o + c);
    for (; c < count; c += kLanes) columns<1>(state.data + c, t, t.u + c, scale, o + c);
  }
};

/// A token's row of outputs: `columns` of them, rounded.
template <class T>
static void store_vector(const float* from, int columns, T* to) {
  for_heads(columns, [&](int c, int count) { store_heads(to + c, load(from + c), count); });
}

/// A token's row of outputs, normalized, gated and rounded.
template <class S, class T>
static void store_normalized(const float* o, const T* gate, const float* weight, float eps, T* to) {
  f32 sums{};
  for_heads(S::V, [&](int c, int count) {
    const f32 x = load_heads(o + c, count);
    sums += x * x;
  });
  const f32 rstd = splat(1.0F / __builtin_sqrtf(sum(sums) / S::V + eps));
  for_heads(S::V, [&](int c, int count) {
    const f32 z = load_heads(gate + c, count);
    const f32 gated = S::NORM_SILU ? z * sigmoid(z) : sigmoid(z);
    store_heads(to + c, load_heads(o + c, count) * rstd * load_heads(weight + c, count) * gated,
                count);
  });
}

/// Elements of 8 bits are multiplied by `scale`; others have no scale.
template <class S, class T, class State>
static void load_state(const T* from, int columns, State state, float scale = 1.0F) {
  constexpr bool kRows = S::STATE_V_FIRST;
  load_tile(from, kRows ? S::K : S::V, kRows ? columns : S::K, kRows ? S::K : columns, state);
  if constexpr (sizeof(T) == 1)
    scale_tile(state, kRows ? columns : S::K, kRows ? S::K : columns, scale);
}
template <class S, class T, class State>
static void store_state(State state, int columns, T* to, float scale = 1.0F) {
  constexpr bool kRows = S::STATE_V_FIRST;
  store_tile(state, kRows ? columns : S::K, kRows ? S::K : columns, to, kRows ? S::K : S::V,
             1.0F / scale);
}

/// Entry i of cu_seqlens, or the start of sequence i of equal lengths.
template <bool Packed, class T>
static int64 sequence_start(const T* cu_seqlens, int64 i, const Extents& e) {
  if constexpr (!Packed) return i * e.T;
  const auto start = static_cast<int64>(cu_seqlens[i]);
  return start < 0 ? 0 : start > e.T ? e.T : start;
}

}  // namespace wyvern::cpu::decode
