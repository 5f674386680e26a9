// StateBackward where beta is one rate a row: what kda_bwd_dqkg and kda_wy_dqkg share.
#pragma once

#include "device/cpu/kda_state_backward.hpp"

namespace wyvern::cpu {

/// Rates of StateBackward: beta, and its gradient as one number a row.
struct RowTotals {
  const float* beta;
  float* dbeta;

  struct Row {
    float beta;
    f32 part;
    float rate(int64) const { return beta; }
    void add(int64, f32 a, f32 b) { part += a * b; }
  };
  Row begin(int r) const { return {beta[r], f32{}}; }
  void end(int r, const Row& row) const { dbeta[r] += sum(row.part); }
};

template <class S>
struct BetaBackward {
  using State = StateBackward<S>;
  using DTYPE = typename State::DTYPE;
  static constexpr int V = S::V;

  State state;
  float* rate;   ///< beta of the chunk's rows
  float* dbeta;  ///< its gradient as far as it goes through states

  template <BetaBackwardLayout<S> Place>
  static BetaBackward at(void* memory) {
    return {.state = State::template at<Place.state>(memory),
            .rate = vector_at<Place.rate>(memory),
            .dbeta = vector_at<Place.dbeta>(memory)};
  }

  /// As StateBackward's, with dv and the first part of dbeta; v, beta and dv from the chunk's first
  /// row on.
  template <class Beta>
  void begin(const typename State::Inputs& in, const TokenRows<const DTYPE>& v,
             const TokenRows<const Beta>& beta, DTYPE* dv) const {
    load_beta<S::BETA_SIGMOID, S::NEG_EIGVAL>(beta, in.rows, rate);
    state.begin(in);
    values_gradient(v, in, dv);
  }

  void tile(const typename State::Inputs& in, int c, int columns, float scale) const {
    state.tile(in, c, columns, scale, RowTotals{rate, dbeta});
  }

 private:
  /// dv = beta X, and dbeta = rowsum(X V).
  void values_gradient(const TokenRows<const DTYPE>& v, const typename State::Inputs& in,
                       DTYPE* dv) const {
    constexpr int kWhole = V / kLanes * kLanes;
    for (int r = 0; r < in.rows; ++r) {
      const float* from = state.X.row(r);
      const int64 row = r * in.value_stride();
      const DTYPE* v_r = v.row(r);
      f32 row_sum{};
      for (int c = 0; c < kWhole; c += kLanes) {
        row_sum += load(from + c) * load(v_r + c);
        store(dv + row + c, rate[r] * load(from + c));
      }
      if constexpr (kWhole < V) {
        row_sum += load(from + kWhole) * load_part(v_r + kWhole, V - kWhole);
        store_part(dv + row + kWhole, rate[r] * load(from + kWhole), V - kWhole);
      }
      dbeta[r] = sum(row_sum);
    }
  }
};

}  // namespace wyvern::cpu
