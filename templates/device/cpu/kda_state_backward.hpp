// The gradients of kda through the state and the WY representation, for one chunk and value head;
// X = Tinv^T dU is the gradient of diag(beta) (V - (exp(G) K) S), S the entering state, dS' the
// gradient of the leaving one.
#pragma once

#include "device/cpu/kda_backward.hpp"

namespace wyvern::cpu {

constexpr int64 kValueRow = row_stride(V), kKeyRow = row_stride(BK), kSquare = row_stride(BT);
constexpr int64 kValues = int64{HV} * V, kKeys = int64{HV} * K;

/// X = Tinv^T dU, from the diagonal's blocks down.
static void solve_transposed(const float* Tinv, const float* dU, int rows, float* X) {
  for (int s = 0; s < rows; s += 16)
    multiply<Layout::columns>(rows - s < 16 ? rows - s : 16, V, rows - s, Tinv + s * kSquare + s,
                              kSquare, dU + s * kValueRow, kValueRow, X + s * kValueRow, kValueRow);
}

/// dv = beta X, and dbeta = rowsum(X V).
static void values_gradient(const float* X, const DTYPE* v, const float* beta, int rows, DTYPE* dv,
                            float* dbeta) {
  constexpr int kWhole = V / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const float* from = X + r * kValueRow;
    f32 row_sum{};
    for (int c = 0; c < kWhole; c += kLanes) {
      row_sum += load(from + c) * load(v + r * kValues + c);
      store(dv + r * kValues + c, beta[r] * load(from + c));
    }
    if constexpr (kWhole < V) {
      row_sum += load(from + kWhole) * load_part(v + r * kValues + kWhole, V - kWhole);
      store_part(dv + r * kValues + kWhole, beta[r] * load(from + kWhole), V - kWhole);
    }
    dbeta[r] = sum(row_sum);
  }
}

/// factor left values^T below diagonal `Below` (0: from the main one on), zeros above, to rows of
/// BT floats, `stride` apart.
template <int Below>
static void store_products(const float* left, const float* values_t, int rows, float factor,
                           float* products, float* to, int64 stride) {
  const i32 lanes = lane_numbers();
  multiply<Layout::rows, Lower::c>(rows, rows, V, left, kValueRow, values_t, kSquare, products,
                                   kSquare);
  for (int r = 0; r < rows; ++r)
    for (int s = 0; s < BT; s += kLanes) {
      const f32 x = s <= r - Below ? load(products + r * kSquare + s) * factor : f32{};
      store(to + r * stride + s, lanes <= r - Below - s ? x : f32{});
    }
}

/// Of dO S^T, V' dS'^T and X S^T, in place, the gradients dq, dk and dG; of end[c], the sum of dS'
/// S over values, the chunk-end term.
static void finish(const KeyTiles& tiles, float* end, int rows, int columns, float scale,
                   const float* beta, float* dbeta) {
  const float* G_end = tiles.G + (rows - 1) * kKeyRow;
  for (int c = 0; c < columns; c += kLanes) store(end + c, load(end + c) * exp(load(G_end + c)));
  for (int r = 0; r < rows; ++r) {
    f32 row_sum{};
    for (int c = 0; c < columns; c += kLanes) {
      const int64 i = r * kKeyRow + c;
      const f32 G = load(tiles.G + i), k = load(tiles.k + i);
      const f32 from_start = exp(G);
      const f32 dw = -from_start * load(tiles.dG + i);  // gradient of beta k, through W
      const f32 dq = scale * from_start * load(tiles.dq + i);
      const f32 to_end = exp(load(G_end + c) - G) * load(tiles.dk + i);
      // The last row gives to the chunk's end what it takes.
      const f32 given = r == rows - 1 ? f32{} : k * to_end;
      row_sum += k * dw;
      store(tiles.dq + i, dq);
      store(tiles.dk + i, to_end + beta[r] * dw);
      store(tiles.dG + i, load(tiles.q + i) * dq + k * (beta[r] * dw) - given);
      store(end + c, load(end + c) + given);
    }
    dbeta[r] += sum(row_sum);
  }
  float* last = tiles.dG + (rows - 1) * kKeyRow;
  for (int c = 0; c < columns; c += kLanes) store(last + c, load(last + c) + load(end + c));
}

/// end[c] = sum over v of a_vc b_vc.
static void column_dots(const float* a, const float* b, int columns, float* end) {
  for (int c = 0; c < columns; c += kLanes) {
    f32 total{};
    for (int v = 0; v < V; ++v) total += load(a + v * kKeyRow + c) * load(b + v * kKeyRow + c);
    store(end + c, total);
  }
}

/// Tensors that the walk reads: whole, or those of a chunk and value head from its first row on.
struct Inputs {
  const DTYPE *q, *k, *v, *v_new;
  const BETA_DTYPE* beta;
  const DTYPE* Tinv;
  const float *Gk, *q_rstd, *k_rstd;
  const DTYPE *h, *dh, *dO, *dU;
  int rows = 0;

  Inputs at(const Chunk& chunk, int64 slot, int64 hv) const {
    const int64 row = chunk.token * HV + hv, key_row = chunk.token * H + hv / (HV / H);
    const int64 state = (slot * HV + hv) * K * V;
    return {.q = q + key_row * K,
            .k = k + key_row * K,
            .v = v + row * V,
            .v_new = v_new + row * V,
            .beta = beta + row,
            .Tinv = Tinv + row * BT,
            .Gk = Gk + row * K,
            .q_rstd = QK_L2NORM ? q_rstd + key_row : nullptr,
            .k_rstd = QK_L2NORM ? k_rstd + key_row : nullptr,
            .h = h + state,
            .dh = dh + state,
            .dO = dO + row * V,
            .dU = dU + row * V,
            .rows = chunk.rows};
  }
};

/// The walk over one chunk's K tiles.
struct StateBackward {
  float *dO, *values, *X;  // dU, then V', in `values`
  float *values_t, *h_t, *dh_t;
  float* square;  // Tinv, then products
  KeyTiles tiles;
  float *end, *rate, *dbeta, *q_scale, *k_scale;

  explicit StateBackward(Scratch& scratch)
      : dO(scratch.tile(BT, V)),
        values(scratch.tile(BT, V)),
        X(scratch.tile(BT, V)),
        values_t(scratch.tile(V, BT)),
        h_t(scratch.tile(V, BK)),
        dh_t(scratch.tile(V, BK)),
        square(scratch.tile(BT, BT)),
        end(scratch.vector(BK)),
        rate(scratch.vector(BT)),
        dbeta(scratch.vector(BT)),
        q_scale(scratch.vector(BT)),
        k_scale(scratch.vector(BT)) {
    const auto tile = [&] { return scratch.tile(BT, BK); };
    tiles = {.q = tile(), .k = tile(), .G = tile(), .dq = tile(), .dk = tile(), .dG = tile()};
  }

  /// X, with dv and the first part of dbeta, and what the K tiles need.
  void begin(const Inputs& in, DTYPE* dv) const {
    load_beta<BETA_SIGMOID, NEG_EIGVAL>(in.beta, HV, in.rows, rate);
    if constexpr (QK_L2NORM) {
      load_column(in.q_rstd, H, in.rows, q_scale);
      load_column(in.k_rstd, H, in.rows, k_scale);
    }
    load_tile(in.Tinv, int64{HV} * BT, in.rows, BT, square, kSquare);
    load_tile(in.dU, kValues, in.rows, V, values, kValueRow);
    solve_transposed(square, values, in.rows, X);
    values_gradient(X, in.v, rate, in.rows, dv, dbeta);
    load_tile(in.dO, kValues, in.rows, V, dO, kValueRow);
    load_tile(in.v_new, kValues, in.rows, V, values, kValueRow);
    transpose<true>(values, kValueRow, in.rows, V, values_t, kSquare);
  }

  /// scale tril(dO V'^T) and -strict_tril(X V'^T), `stride` floats between rows.
  void products(int rows, float scale, float* dAqk, float* dA, int64 stride) const {
    store_products<0>(dO, values_t, rows, scale, square, dAqk, stride);
    store_products<1>(X, values_t, rows, -1.0F, square, dA, stride);
  }

  /// The gradients of `columns` of K from c, in the tiles; adds to dbeta.
  void tile(const Inputs& in, int c, int columns, float scale) const {
    transpose<true>(in.h + int64{c} * V, V, columns, V, h_t, kKeyRow);
    transpose<true>(in.dh + int64{c} * V, V, columns, V, dh_t, kKeyRow);
    load_tile<QK_L2NORM>(in.q + c, int64{H} * K, in.rows, columns, tiles.q, kKeyRow, q_scale);
    load_tile<QK_L2NORM>(in.k + c, int64{H} * K, in.rows, columns, tiles.k, kKeyRow, k_scale);
    load_tile(in.Gk + c, kKeys, in.rows, columns, tiles.G, kKeyRow);
    multiply(in.rows, columns, V, dO, kValueRow, h_t, kKeyRow, tiles.dq, kKeyRow);
    multiply(in.rows, columns, V, values, kValueRow, dh_t, kKeyRow, tiles.dk, kKeyRow);
    multiply(in.rows, columns, V, X, kValueRow, h_t, kKeyRow, tiles.dG, kKeyRow);
    column_dots(h_t, dh_t, columns, end);
    finish(tiles, end, in.rows, columns, scale, rate, dbeta);
  }
};

}  // namespace wyvern::cpu
