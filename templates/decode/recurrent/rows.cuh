// A token's row of k, and its other inputs, prepared for the warps that hold the state: in fp32,
// convolved, with norms, gates and factors applied once for all threads. S is the kernel's Spec.
#pragma once

#include "decode/recurrent/held_rows.cuh"
#include "decode/recurrent/hopper_layout.hpp"

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
  int key_heads;

  // Channels of the convolution are those of q, then of each step of k, then of each step of v.
  WYVERN_DEVICE HeadRows<S> queries(int head) const {
    const int column = head / S::GROUP * S::K;
    return {q.at(0, column), 1, column};
  }
  WYVERN_DEVICE HeadRows<S> keys(int head, int step) const {
    const int column = head / S::GROUP * S::K;
    return {k.at(step, column), S::STEPS, (1 + step) * width() + column};
  }
  WYVERN_DEVICE HeadRows<S> values(int head, int step) const {
    const int column = head * S::V;
    return {v.at(step, column), S::STEPS,
            (1 + S::STEPS) * width() + step * (int64{key_heads} * S::GROUP * S::V) + column};
  }

 private:
  WYVERN_DEVICE int64 width() const { return int64{key_heads} * S::K; }
};

/// Row `row` of k and value head `head`: of a token's STEPS rows the first decays the state, the
/// last reads it with q. By a warp; it holds what is stored, so that nothing waits for a load
/// before it is prepared.
template <class S>
class Row {
 public:
  static constexpr recurrent::RowLayout<S> kPlaces{S{}};

  WYVERN_DEVICE void load(const Tensors<S>& in, const Convolution<S>& conv, int64 row,
                          const StateItem& item) {
    const int head = head_ = item.head, step = step_ = static_cast<int>(row % S::STEPS);
    first_ = step == 0;
    last_ = step == S::STEPS - 1;
    const int64 token = row / S::STEPS;
    k_.load(in.keys(head, step), token, item, conv);
    if (last_) q_.load(in.queries(head), token, item, conv);
    v_.load(in.values(head, step), token, item, conv);
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

  WYVERN_DEVICE void prepare(float* to, const Tensors<S>& in, const Convolution<S>& conv,
                             const Extents& e) const {
    auto k = k_.floats(in.keys(head_, step_), conv), q = q_.floats(in.queries(head_), conv);
    if constexpr (S::QK_L2NORM) scale(k, reciprocal_sqrt(k.dot(k) + 1e-6f));
    const float q_rstd = S::QK_L2NORM ? reciprocal_sqrt(q.dot(q) + 1e-6f) : 1.0f;
    scale(q, last_ ? e.scale * q_rstd : 0.0f);
    k.store(to + kPlaces.k);
    q.store(to + kPlaces.q);
    auto v = v_.floats(in.values(head_, step_), conv);
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

  int head_ = 0, step_ = 0;
  bool first_ = true, last_ = true;
  HeldRow<S, S::K> k_, q_;
  HeldRow<S, S::V> v_;
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
