// Gradients of gdn2's chunks: kda's blocks with a rate of one number an element in beta's place.
#pragma once

#include "device/cuda/gdn2.cuh"
#include "device/cuda/kda_backward.cuh"

namespace wyvern::cuda::gdn2 {

/// The erase gate as rates of kda's blocks.
template <class Gate, int Size, int Cols>
struct ElementRates {
  Tile<Gate, Size, Cols> gate;

  struct Row {
    const Gate* gates;
    WYVERN_DEVICE float operator()(int c) const { return to_float(gates[c]); }
  };
  WYVERN_DEVICE Row row(int r) const { return {gate.at(r, 0)}; }
};

/// Their gradients in sixteen rows and sixteen columns.
struct ElementGradients {
  Accumulator x[2];
};
WYVERN_DEVICE void add_product(ElementGradients& d, int half, int n, int j, float a, float b) {
  d.x[n].x[2 * half + j] += a * b;
}

/// kda's, with a rate for each element.
template <class T, class Gate, Precision P, int Size, int Cols, int Values, bool Scaled>
struct InterBackward : kda::InterBackward<T, P, Size, Cols, Values, Scaled> {
  ElementRates<Gate, Size, Cols> rates;

  /// As kda's; sets the gradients of the rates too.
  template <int N>
  WYVERN_DEVICE void set(kda::KeyGradients (&d)[N], ElementGradients (&d_rates)[N], float* sums,
                         int strip, int col, int last, float scale) const {
    this->multiply_states(d, strip, col);
#pragma unroll
    for (int pair = 0; pair < N; ++pair)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = col + pair * 16 + n * 8 + accumulator_col(0);
        const Float2 G_end = kda::load_two(this->tile.G, Size - 1, c);
        float end[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half)
          finish(d[pair].dq[n].x + 2 * half, d[pair].dk[n].x + 2 * half, d[pair].dG[n].x + 2 * half,
                 d_rates[pair].x[n].x + 2 * half, end, G_end,
                 strip * 16 + accumulator_row(2 * half), c, last, scale);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          for (int mask = 4; mask < 32; mask *= 2) end[j] += shuffle_xor(end[j], mask);
          if (lane_index() < 4) sums[c + j] = end[j];
        }
      }
  }

 private:
  /// Two neighbouring columns c, c + 1 of row r.
  WYVERN_DEVICE void finish(float* dq, float* dk, float* dG, float* d_rates, float (&end)[2],
                            const Float2& G_end, int r, int c, int last, float scale) const {
    const Float2 G = kda::load_two(this->tile.G, r, c);
    const Float2 q = kda::load_two(this->tile.q, r, c);
    const Float2 k = kda::load_two(this->tile.k, r, c);
    const Float2 rate = kda::load_two(rates.gate, r, c);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float q_r = Scaled ? q.at[j] * this->rows.q_rstd[r] : q.at[j];
      const float k_r = Scaled ? k.at[j] * this->rows.k_rstd[r] : k.at[j];
      const float from_start = decay(G.at[j]);
      const float dw = -from_start * dG[j];  // gradient of erase k, through W
      dq[j] *= scale * from_start;
      const float to_end = dk[j] * decay(G_end.at[j] - G.at[j]);
      const float through_w = rate.at[j] * dw;
      d_rates[j] = k_r * dw;
      dk[j] = to_end + through_w;
      const float given = r == last ? 0.0f : k_r * to_end;
      dG[j] = q_r * dq[j] + k_r * through_w - given;
      end[j] += given;
    }
  }
};

}  // namespace wyvern::cuda::gdn2
