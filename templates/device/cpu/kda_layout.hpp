// Scratch of kda's blocks.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::cpu {

/// Rows that share an anchor. With a bounded gate also their products with each other use it;
/// without, each of these pairs has its own exponent.
constexpr int anchor_rows(bool bounded) { return bounded ? 16 : 8; }

/// Of IntraProducts.
template <class S>
struct IntraProductsLayout {
  TilePlace q, k, G, erasing, k_t, G_t, left, right, products;
  long bytes;

  constexpr explicit IntraProductsLayout(const S& s, LayoutBuilder at = {}) {
    const int strip = anchor_rows(s.SAFE_GATE);
    q = at.tile(s.BT, s.K);
    k = at.tile(s.BT, s.K);
    G = at.tile(s.BT, s.K);
    erasing = s.ERASE_WRITE ? at.tile(s.BT, s.K) : k;
    k_t = at.tile(s.K, s.BT);
    G_t = at.tile(s.K, s.BT);
    left = at.tile(2 * strip, s.K);
    right = at.tile(s.K, s.BT);
    products = at.tile(2 * strip, s.BT);
    bytes = at.bytes;
  }
};

/// Of KeyTiles, for chunks of `rows` rows and `columns` columns of K at a time.
struct KeyTilesLayout {
  TilePlace q, k, G, dq, dk, dG;
  long bytes = 0;

  constexpr KeyTilesLayout() = default;
  constexpr KeyTilesLayout(long rows, long cols, LayoutBuilder at = {}) {
    q = at.tile(rows, cols);
    k = at.tile(rows, cols);
    G = at.tile(rows, cols);
    dq = at.tile(rows, cols);
    dk = at.tile(rows, cols);
    dG = at.tile(rows, cols);
    bytes = at.bytes;
  }
};

/// Of IntraBackward's scratch, for such chunks.
struct IntraBackwardLayout {
  TilePlace after, late_q, late_k, sum_q, sum_k, before, early, sum;
  long bytes = 0;

  constexpr IntraBackwardLayout() = default;
  constexpr IntraBackwardLayout(long rows, long cols, LayoutBuilder at = {}) {
    after = at.tile(16, cols);
    late_q = at.tile(16, cols);
    late_k = at.tile(16, cols);
    sum_q = at.tile(16, cols);
    sum_k = at.tile(16, cols);
    before = at.tile(rows, cols);
    early = at.tile(rows, cols);
    sum = at.tile(rows, cols);
    bytes = at.bytes;
  }
};

/// Of ProductGradients, for chunks of `rows` rows.
struct ProductGradientsLayout {
  TilePlace dAqk, dA;
  VectorPlace diagonal;
  long bytes = 0;

  constexpr ProductGradientsLayout() = default;
  constexpr explicit ProductGradientsLayout(long rows, LayoutBuilder at = {}) {
    dAqk = at.tile(rows, rows);
    dA = at.tile(rows, rows);
    diagonal = at.vector(rows);
    bytes = at.bytes;
  }
};

/// Of StateBackward.
template <class S>
struct StateBackwardLayout {
  TilePlace dO, values, X, values_t, h_t, dh_t, square;
  VectorPlace end, q_scale, k_scale;
  KeyTilesLayout tiles;
  long bytes;

  constexpr explicit StateBackwardLayout(const S& s, LayoutBuilder at = {}) {
    dO = at.tile(s.BT, s.V);
    values = at.tile(s.BT, s.V);
    X = at.tile(s.BT, s.V);
    values_t = at.tile(s.V, s.BT);
    h_t = at.tile(s.V, s.BK);
    dh_t = at.tile(s.V, s.BK);
    square = at.tile(s.BT, s.BT);
    end = at.vector(s.BK);
    q_scale = at.vector(s.BT);
    k_scale = at.vector(s.BT);
    tiles = at.part<KeyTilesLayout>(s.BT, s.BK);
    bytes = at.bytes;
  }
};

/// Of RateBackward.
template <class S>
struct RateBackwardLayout {
  StateBackwardLayout<S> state;
  VectorPlace rate, dbeta;     ///< without ERASE_WRITE
  TilePlace rates, gradients;  ///< with it
  long bytes;

  constexpr explicit RateBackwardLayout(const S& s) : state(s) {
    LayoutBuilder at{state.bytes};
    if (s.ERASE_WRITE) {
      rates = at.tile(s.BT, s.BK);
      gradients = at.tile(s.BT, s.BK);
    } else {
      rate = at.vector(s.BT);
      dbeta = at.vector(s.BT);
    }
    bytes = at.bytes;
  }
};

/// Floats for a vector of partial sums a row, on a processor with the widest vectors.
constexpr long row_sums(long rows) { return rows * 16; }

}  // namespace wyvern::cpu
