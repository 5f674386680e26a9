// A token's row of k, and its other inputs, prepared for the warps that hold the state: in fp32,
// with norms, gates and factors applied once for all threads. S is the kernel's Spec.
#pragma once

#include "decode/recurrent/hopper_layout.hpp"
#include "decode/recurrent/items.cuh"

namespace wyvern::cuda::decode {

template <class S>
struct Tensors {
  template <DType type>
  using Rows = TokenRows<const Element<type>>;
  Rows<S::DTYPE> q, k, v;
  Rows<S::BETA_DTYPE> beta, erase, write;
  Rows<S::G_DTYPE> g;
  const float *A_log, *dt_bias;
  Rows<S::DTYPE> norm_gate;
  const float* norm_weight;
};

/// A warp's part of a vector, four neighbours a lane and turn; zeros past its end.
template <class T, int Count>
struct WarpVector {
  static constexpr int kTurns = larger(ceil_div(Count, 128), 1);
  Vector<T, 4> part[kTurns] = {};

  /// visit(turn, index of the turn's first element) for the lane's turns.
  template <class Visit>
  WYVERN_DEVICE static void each(Visit&& visit) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int first = t * 128 + lane_index() * 4;
      if (Count % 128 == 0 || first < Count) visit(t, first);
    }
  }
  WYVERN_DEVICE void load(const T* from) {
    each([&](int t, int first) { part[t] = cuda::load<4>(from + first); });
  }
  WYVERN_DEVICE void store(T* to) const {
    each([&](int t, int first) { store_run<true>(to + first, part[t].at); });
  }
  /// change(x, turn, i) of all elements.
  template <class Change>
  WYVERN_DEVICE void change(Change&& change) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) part[t].at[i] = change(part[t].at[i], t, i);
  }
  WYVERN_DEVICE float dot(const WarpVector& with) const {
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = fused_multiply_add(part[t].at[i], with.part[t].at[i], sum);
    return sum_warp(sum);
  }
};

template <class T, int Count>
WYVERN_DEVICE WarpVector<float, Count> in_floats(const WarpVector<T, Count>& x) {
  WarpVector<float, Count> y;
  y.change([&](float, int t, int i) { return to_float(x.part[t].at[i]); });
  return y;
}

/// Row `row` of k and value head `head`: of a token's STEPS rows the first decays the state, the
/// last reads it with q. By a warp; it holds what is stored, so that nothing waits for a load
/// before it is prepared.
template <class S>
class Row {
 public:
  static constexpr recurrent::RowLayout<S> kPlaces{S{}};

  WYVERN_DEVICE void load(const Tensors<S>& in, int64 row, int head) {
    first_ = row % S::STEPS == 0;
    last_ = row % S::STEPS == S::STEPS - 1;
    const int64 token = row / S::STEPS;
    const int keys = head / S::GROUP * S::K;
    k_.load(in.k.row(row) + keys);
    if (last_) q_.load(in.q.row(token) + keys);
    v_.load(in.v.row(row) + head * S::V);
    if constexpr (S::ERASE_WRITE) {
      erase_.load(in.erase.row(row) + head * S::K);
      write_.load(in.write.row(row) + head * S::V);
    } else {
      beta_ = in.beta.row(row)[head];
    }
    if constexpr (S::GATED)
      if (first_) load_gates(in, token, head);
    if constexpr (S::OUTPUT_NORM) {
      norm_gate_.load(in.norm_gate.row(token) + head * S::V);
      norm_weight_.load(in.norm_weight);
    }
  }

  WYVERN_DEVICE void prepare(float* to, const Extents& e) const {
    auto k = in_floats(k_), q = in_floats(q_);
    if constexpr (S::QK_L2NORM) scale(k, reciprocal_sqrt(k.dot(k) + 1e-6f));
    const float q_rstd = S::QK_L2NORM ? reciprocal_sqrt(q.dot(q) + 1e-6f) : 1.0f;
    scale(q, last_ ? e.scale * q_rstd : 0.0f);
    k.store(to + kPlaces.k);
    q.store(to + kPlaces.q);
    auto v = in_floats(v_);
    float beta = 1.0f;
    if constexpr (S::ERASE_WRITE) {
      auto erasing = in_floats(erase_);
      erasing.change([&](float x, int t, int i) { return x * k.part[t].at[i]; });
      erasing.store(to + kPlaces.erasing);
      v.change([&](float x, int t, int i) { return x * to_float(write_.part[t].at[i]); });
    } else {
      beta = activate_beta<S::BETA_SIGMOID, S::NEG_EIGVAL>(beta_);
    }
    v.store(to + kPlaces.v);
    if constexpr (S::OUTPUT_NORM) {
      auto factors = norm_weight_;
      factors.change([&](float x, int t, int i) {
        return x * output_gate<S>(to_float(norm_gate_.part[t].at[i]));
      });
      factors.store(to + kPlaces.output_gate);
    }
    const float numbers[4] = {prepare_decay(to, e.lower_bound), beta, k.dot(q), 0.0f};
    if (lane_index() == 0) store_run<true>(to + kPlaces.numbers, numbers);
  }

 private:
  WYVERN_DEVICE void load_gates(const Tensors<S>& in, int64 token, int head) {
    if constexpr (S::GATE_IN_KERNEL && S::HAS_A_LOG) A_log_ = in.A_log[head];
    if constexpr (S::VECTOR_GATE) {
      gates_.load(in.g.row(token) + head * S::K);
      if constexpr (S::GATE_IN_KERNEL && S::HAS_DT_BIAS) biases_.load(in.dt_bias + head * S::K);
    } else {
      gate_ = in.g.row(token)[head];
      if constexpr (S::GATE_IN_KERNEL && S::HAS_DT_BIAS) bias_ = in.dt_bias[head];
    }
  }
  /// The decay of all keys; where each has its own, they go to the row.
  WYVERN_DEVICE float prepare_decay([[maybe_unused]] float* to,
                                    [[maybe_unused]] float lower_bound) const {
    if constexpr (!S::GATED) return 1.0f;
    const float rate = S::GATE_IN_KERNEL && S::HAS_A_LOG ? gate_rate<S::LOWER_BOUND>(A_log_) : 1.0f;
    if constexpr (!S::VECTOR_GATE)
      return first_ ? decay_of<S>(to_float(gate_), bias_, rate, lower_bound) : 1.0f;
    auto decays = in_floats(gates_);
    decays.change([&](float g, int t, int i) {
      return first_ ? decay_of<S>(g, biases_.part[t].at[i], rate, lower_bound) : 1.0f;
    });
    decays.store(to + kPlaces.decay);
    return 1.0f;
  }
  template <int Count>
  WYVERN_DEVICE static void scale(WarpVector<float, Count>& x, float factor) {
    x.change([&](float y, int, int) { return y * factor; });
  }

  bool first_ = true, last_ = true;
  WarpVector<Element<S::DTYPE>, S::K> k_, q_;
  WarpVector<Element<S::DTYPE>, S::V> v_;
  Element<S::BETA_DTYPE> beta_{};
  Element<S::G_DTYPE> gate_{};
  float bias_ = 0.0f, A_log_ = 0.0f;
  WarpVector<Element<S::G_DTYPE>, S::VECTOR_GATE ? S::K : 0> gates_;     // VECTOR_GATE
  WarpVector<float, S::VECTOR_GATE ? S::K : 0> biases_;                  // VECTOR_GATE
  WarpVector<Element<S::BETA_DTYPE>, S::ERASE_WRITE ? S::K : 0> erase_;  // ERASE_WRITE
  WarpVector<Element<S::BETA_DTYPE>, S::ERASE_WRITE ? S::V : 0> write_;  // ERASE_WRITE
  WarpVector<Element<S::DTYPE>, S::OUTPUT_NORM ? S::V : 0> norm_gate_;   // OUTPUT_NORM
  WarpVector<float, S::OUTPUT_NORM ? S::V : 0> norm_weight_;             // OUTPUT_NORM
};

}  // namespace wyvern::cuda::decode
