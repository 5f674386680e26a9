// StateBackward with its rates, beta or with ERASE_WRITE the erase and write gates, for
// kda_bwd_dqkg and kda_wy_dqkg.
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
struct RateBackward {
  using State = StateBackward<S>;
  using DTYPE = typename State::DTYPE;
  using Gate = Element<S::BETA_DTYPE>;
  static constexpr int V = S::V;

  State state;
  float* rate;   ///< beta of the chunk's rows
  float* dbeta;  ///< the part of its gradient through states
  /// BK columns of the erase gate, and the part of its gradient through states.
  Tile<S::ERASE_WRITE ? S::BK : 0> rates, gradients;

  template <RateBackwardLayout<S> Place>
  static RateBackward at(void* memory) {
    return {.state = State::template at<Place.state>(memory),
            .rate = vector_at<Place.rate>(memory),
            .dbeta = vector_at<Place.dbeta>(memory),
            .rates = tile_at<Place.rates>(memory),
            .gradients = tile_at<Place.gradients>(memory)};
  }

  /// As StateBackward::begin(), and computes dv, and dwrite or the first part of dbeta. Tensors
  /// start at the chunk's first row.
  void begin(const typename State::Inputs& in, const TokenRows<const DTYPE>& v,
             const TokenRows<const Gate>& beta, const TokenRows<const Gate>& write, DTYPE* dv,
             Gate* dwrite) const {
    state.begin(in);
    if constexpr (S::ERASE_WRITE) {
      gated_values_gradient(v, write, in, dv, dwrite);
    } else {
      load_beta<S::BETA_SIGMOID, S::NEG_EIGVAL>(beta, in.rows, rate);
      values_gradient(v, in, dv);
    }
  }

  void tile(const typename State::Inputs& in, const TokenRows<const Gate>& erase, int c,
            int columns, float scale) const {
    if constexpr (S::ERASE_WRITE) {
      load_tile(erase.at(0, c), in.rows, columns, rates);
      clear_rows(gradients, 0, in.rows, columns);
      state.tile(in, c, columns, scale, ElementRates{rates.data, gradients.data});
    } else {
      state.tile(in, c, columns, scale, RowTotals{rate, dbeta});
    }
  }

  /// The rates of the tile's products inside the chunk; row_sums: of beta's gradient, kLanes a row.
  RatesOf<S> intra_rates(float* row_sums) const {
    if constexpr (S::ERASE_WRITE)
      return {rates.data, gradients.data};
    else
      return {rate, row_sums};
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

  /// dv = write X and dwrite = v X.
  void gated_values_gradient(const TokenRows<const DTYPE>& v, const TokenRows<const Gate>& write,
                             const typename State::Inputs& in, DTYPE* dv, Gate* dwrite) const {
    constexpr int kWhole = V / kLanes * kLanes;
    for (int r = 0; r < in.rows; ++r) {
      const float* from = state.X.row(r);
      const int64 row = r * in.value_stride();
      const DTYPE* v_r = v.row(r);
      const Gate* write_r = write.row(r);
      for (int c = 0; c < kWhole; c += kLanes) {
        store(dv + row + c, load(from + c) * load(write_r + c));
        store(dwrite + row + c, load(from + c) * load(v_r + c));
      }
      if constexpr (kWhole < V) {
        constexpr int kRest = V - kWhole;
        const f32 x = load(from + kWhole);
        store_part(dv + row + kWhole, x * load_part(write_r + kWhole, kRest), kRest);
        store_part(dwrite + row + kWhole, x * load_part(v_r + kWhole, kRest), kRest);
      }
    }
  }
};

}  // namespace wyvern::cpu
