// The per-token scalars of a head: its gate and beta. S is the kernel's Spec.
#pragma once

#include "device/cuda/gate.cuh"
#include "device/cuda/split.cuh"
#include "device/cuda/token_rows.cuh"

namespace wyvern::cuda::sm90 {

/// The log decay of a row with one gate per head.
template <class S>
struct ScalarGate {
  float floor, bias, A_log;

  /// A_log and dt_bias are read where the gate is computed in the kernel.
  WYVERN_DEVICE static ScalarGate of_head(const Extents& e, const float* A_log,
                                          const float* dt_bias, int head) {
    ScalarGate gate{e.gate_floor, 0.0f, 0.0f};
    if constexpr (S::GATE_IN_KERNEL) {
      gate.A_log = A_log[head];
      if constexpr (S::HAS_DT_BIAS) gate.bias = dt_bias[head];
    }
    return gate;
  }
  WYVERN_DEVICE float operator()(Element<S::G_DTYPE> raw) const {
    const float x = to_float(raw);
    return maximum(S::GATE_IN_KERNEL ? log_decay(x + bias, A_log) : x, floor);
  }
};

template <class S>
struct ScalarRows {
  TokenRows<const Element<S::G_DTYPE>> g;
  TokenRows<const Element<S::BETA_DTYPE>> beta;
};

/// stretch() of token `t` of a head; k is of its key head.
template <class S>
WYVERN_DEVICE float stretch_of(int64 t, int head, const ScalarGate<S>& gate,
                               const ScalarRows<S>& rows,
                               const TokenRows<const Element<S::DTYPE>>& k) {
  const float rate = activate_beta<S::BETA_SIGMOID, S::NEG_EIGVAL>(rows.beta.row(t)[head]);
  // A normalized row is no longer, and the bound grows with it.
  const float square = S::QK_L2NORM ? 1.0f : squared_length<S::K>(k.row(t));
  return stretch(gate(rows.g.row(t)[head]), rate, square);
}

}  // namespace wyvern::cuda::sm90
