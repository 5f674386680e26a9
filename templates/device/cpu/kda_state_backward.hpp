// The gradients of kda through the state and the WY representation, for one chunk and value head; X
// = Tinv^T dU is the gradient of diag(beta) (V - (exp(G) K) S), S the entering state, dS' the
// gradient of the leaving one. A class of rates (RowRates) is used for beta.
#pragma once

#include "device/cpu/kda_backward.hpp"

namespace wyvern::cpu {

/// Goes over one chunk's tiles of K.
template <class S>
struct StateBackward {
  static constexpr int BT = S::BT, BK = S::BK, K = S::K, V = S::V;
  using DTYPE = Element<S::DTYPE>;

  /// Tensors that it reads: whole, or from the first row of a chunk and value head on.
  struct Inputs {
    TokenRows<const DTYPE> q, k, dO;
    const DTYPE *v_new, *Tinv;
    const float *Gk, *q_rstd, *k_rstd;
    const DTYPE *h, *dh, *dU;
    const float *state_unit, *dstate_unit;
    const Extents& e;
    int rows = 0;
    float unit = 1.0F, d_unit = 1.0F;  ///< of h and v_new, of dh and dU

    /// Elements from a token to the next one of values [T, HV, V], of keys [T, HV, K].
    int64 value_stride() const { return int64{e.HV} * V; }
    int64 key_stride() const { return int64{e.HV} * K; }

    Inputs at(const Chunk& chunk, int64 slot, int64 hv) const {
      const int64 row = chunk.token * e.HV + hv, key = e.key_head(hv);
      const int64 key_row = chunk.token * e.H + key;
      const int64 state = (slot * e.HV + hv) * K * V;
      return {.q = q.at(chunk.token, key * K),
              .k = k.at(chunk.token, key * K),
              .dO = dO.at(chunk.token, hv * V),
              .v_new = v_new + row * V,
              .Tinv = Tinv + row * BT,
              .Gk = Gk + row * K,
              .q_rstd = S::QK_L2NORM ? q_rstd + key_row : nullptr,
              .k_rstd = S::QK_L2NORM ? k_rstd + key_row : nullptr,
              .h = h + state,
              .dh = dh + state,
              .dU = dU + row * V,
              .state_unit = state_unit,
              .dstate_unit = dstate_unit,
              .e = e,
              .rows = chunk.rows,
              .unit = S::STATE_UNIT ? state_unit[slot * e.HV + hv] : 1.0F,
              .d_unit = S::STATE_UNIT ? dstate_unit[slot * e.HV + hv] : 1.0F};
    }
  };

  Tile<V> dO, values, X;  ///< dU, then V', in `values`
  Tile<BT> values_t;
  Tile<BK> h_t, dh_t;
  Tile<BT> square;  ///< Tinv, then products
  KeyTiles<BK> tiles;
  float *end, *q_scale, *k_scale;

  template <StateBackwardLayout<S> Place>
  static StateBackward at(void* memory) {
    return {.dO = tile_at<Place.dO>(memory),
            .values = tile_at<Place.values>(memory),
            .X = tile_at<Place.X>(memory),
            .values_t = tile_at<Place.values_t>(memory),
            .h_t = tile_at<Place.h_t>(memory),
            .dh_t = tile_at<Place.dh_t>(memory),
            .square = tile_at<Place.square>(memory),
            .tiles = key_tiles_at<Place.tiles>(memory),
            .end = vector_at<Place.end>(memory),
            .q_scale = vector_at<Place.q_scale>(memory),
            .k_scale = vector_at<Place.k_scale>(memory)};
  }

  /// Computes X and loads the other operands of the K tiles.
  void begin(const Inputs& in) const {
    if constexpr (S::QK_L2NORM) {
      load_column(in.q_rstd, in.e.H, in.rows, q_scale);
      load_column(in.k_rstd, in.e.H, in.rows, k_scale);
    }
    load_tile(in.Tinv, int64{in.e.HV} * BT, in.rows, BT, square);
    load_tile(in.dU, in.value_stride(), in.rows, V, values);
    if constexpr (S::STATE_UNIT) scale_tile(values, in.rows, V, in.d_unit);
    solve_transposed(square, values, in.rows, X);
    load_tile(in.dO, in.rows, V, dO);
    load_tile(in.v_new, in.value_stride(), in.rows, V, values);
    if constexpr (S::STATE_UNIT) scale_tile(values, in.rows, V, in.unit);
    transpose(values, in.rows, V, values_t);
  }

  /// scale tril(dO V'^T) and -strict_tril(X V'^T), `stride` floats between rows.
  void products(int rows, float scale, float* dAqk, float* dA, int64 stride) const {
    store_products<0>(dO, values_t, rows, scale, square, dAqk, stride);
    store_products<1>(X, values_t, rows, -1.0F, square, dA, stride);
  }

  /// Computes the gradients of `columns` columns of K from c on in the tiles; adds to those of the
  /// rates.
  template <class Rates>
  void tile(const Inputs& in, int c, int columns, float scale, const Rates& rates) const {
    transpose(in.h + int64{c} * V, V, columns, V, h_t);
    transpose(in.dh + int64{c} * V, V, columns, V, dh_t);
    if constexpr (S::STATE_UNIT) {
      scale_tile(h_t, V, columns, in.unit);
      scale_tile(dh_t, V, columns, in.d_unit);
    }
    load_tile<S::QK_L2NORM>(in.q.at(0, c), in.rows, columns, tiles.q, q_scale);
    load_tile<S::QK_L2NORM>(in.k.at(0, c), in.rows, columns, tiles.k, k_scale);
    load_tile(in.Gk + c, in.key_stride(), in.rows, columns, tiles.G);
    multiply(in.rows, columns, V, dO, h_t, tiles.dq);
    multiply(in.rows, columns, V, values, dh_t, tiles.dk);
    multiply(in.rows, columns, V, X, h_t, tiles.dG);
    column_dots(h_t, dh_t, columns, end);
    finish(tiles, end, in.rows, columns, scale, rates);
  }

 private:
  /// X = Tinv^T dU, from the diagonal's blocks down.
  static void solve_transposed(Tile<BT> Tinv, Tile<V> dU, int rows, Tile<V> X) {
    for (int s = 0; s < rows; s += 16)
      multiply<Layout::columns>(rows - s < 16 ? rows - s : 16, V, rows - s, Tinv.from(s, s),
                                dU.from(s), X.from(s));
  }

  /// factor left values^T below diagonal `Below` (0: from the main one on), zeros above, to rows of
  /// BT floats, `stride` apart.
  template <int Below>
  static void store_products(Tile<V> left, Tile<BT> values_t, int rows, float factor,
                             Tile<BT> products, float* to, int64 stride) {
    const i32 lanes = lane_numbers();
    multiply<Layout::rows, Lower::c>(rows, rows, V, left, values_t, products);
    for (int r = 0; r < rows; ++r)
      for (int s = 0; s < BT; s += kLanes) {
        const f32 x = s <= r - Below ? load(products.row(r) + s) * factor : f32{};
        store(to + r * stride + s, lanes <= r - Below - s ? x : f32{});
      }
  }

  /// Turns dO S^T, V' dS'^T and X S^T in place into the gradients dq, dk and dG; end[c], the sum of
  /// dS' S over values, is the chunk-end term.
  template <class Rates>
  static void finish(const KeyTiles<BK>& tiles, float* end, int rows, int columns, float scale,
                     const Rates& rates) {
    const float* G_end = tiles.G.row(rows - 1);
    for (int c = 0; c < columns; c += kLanes) store(end + c, load(end + c) * exp(load(G_end + c)));
    for (int r = 0; r < rows; ++r) {
      auto row = rates.begin(r);
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = r * Tile<BK>::kStride + c;
        const f32 G = load(tiles.G.data + i), k = load(tiles.k.data + i);
        const f32 from_start = exp(G);
        const f32 dw = -from_start * load(tiles.dG.data + i);  // gradient of beta k, through W
        const f32 dq = scale * from_start * load(tiles.dq.data + i);
        const f32 to_end = exp(load(G_end + c) - G) * load(tiles.dk.data + i);
        // The last row's term cancels with the chunk-end term.
        const f32 given = r == rows - 1 ? f32{} : k * to_end;
        row.add(i, k, dw);
        store(tiles.dq.data + i, dq);
        store(tiles.dk.data + i, to_end + row.rate(i) * dw);
        store(tiles.dG.data + i, load(tiles.q.data + i) * dq + k * (row.rate(i) * dw) - given);
        store(end + c, load(end + c) + given);
      }
      rates.end(r, row);
    }
    float* last = tiles.dG.row(rows - 1);
    for (int c = 0; c < columns; c += kLanes) store(last + c, load(last + c) + load(end + c));
  }

  /// end[c] = sum over v of a_vc b_vc.
  static void column_dots(Tile<BK> a, Tile<BK> b, int columns, float* end) {
    for (int c = 0; c < columns; c += kLanes) {
      f32 total{};
      for (int v = 0; v < V; ++v) total += load(a.row(v) + c) * load(b.row(v) + c);
      store(end + c, total);
    }
  }
};

}  // namespace wyvern::cpu
