// The gradients of kda's products inside a chunk. With E_rs,c = exp(G_rc - G_sc) for rows r > s:
//
//   dq_r += sum_s dAqk_rs E_rs k_s      dk_s += sum_r (dAqk_rs q_r + dA_rs beta_r k_r) E_rs
//   dk_r += beta_r p_r,  dbeta_r += k_r . p_r,  with p_r = sum_s dA_rs E_rs k_s
//
// by rectangles of rows r and s with an anchor row n: E_rs = exp(G_r - G_n) exp(G_n - G_s), so that
// each operand of a product has one factor. A pair adds a term to the gate's gradient in row r and
// subtracts it in row s; both use the same operands, since the sum over later rows that follows
// cancels most of it.
//
// beta_r is from a class of rates: one number a row, or one for each of the row's elements.
#pragma once

#include "device/cpu/chunk.hpp"
#include "device/cpu/kda_layout.hpp"
#include "device/cpu/product.hpp"

namespace wyvern::cpu {

/// A chunk's rows of q and k (with their scales), of the gate, and of the gradients.
template <int Cols>
struct KeyTiles {
  Tile<Cols> q, k, G, dq, dk, dG;
};

template <KeyTilesLayout Place>
inline KeyTiles<Place.q.cols> key_tiles_at(void* memory) {
  return {.q = tile_at<Place.q>(memory),
          .k = tile_at<Place.k>(memory),
          .G = tile_at<Place.G>(memory),
          .dq = tile_at<Place.dq>(memory),
          .dk = tile_at<Place.dk>(memory),
          .dG = tile_at<Place.dG>(memory)};
}

/// Scratch of IntraBackward.
template <int Cols>
struct IntraScratch {
  Tile<Cols> after;           ///< 16 rows: exp(G_r - G_n)
  Tile<Cols> late_q, late_k;  ///< 16 rows: that times q_r, and times beta_r k_r
  Tile<Cols> sum_q, sum_k;    ///< 16 rows of products with earlier rows
  Tile<Cols> before;          ///< a chunk's rows: exp(G_n - G_s)
  Tile<Cols> early;           ///< that times k_s
  Tile<Cols> sum;             ///< a chunk's rows of products with later rows
};

template <IntraBackwardLayout Place>
inline IntraScratch<Place.after.cols> intra_scratch_at(void* memory) {
  return {.after = tile_at<Place.after>(memory),
          .late_q = tile_at<Place.late_q>(memory),
          .late_k = tile_at<Place.late_k>(memory),
          .sum_q = tile_at<Place.sum_q>(memory),
          .sum_k = tile_at<Place.sum_k>(memory),
          .before = tile_at<Place.before>(memory),
          .early = tile_at<Place.early>(memory),
          .sum = tile_at<Place.sum>(memory)};
}

/// Strictly lower parts of dAqk and dA as tiles, zeros elsewhere, and dAqk's diagonal.
template <int Size>
struct ProductGradients {
  Tile<Size> dAqk, dA;
  float* diagonal;
};

template <ProductGradientsLayout Place>
inline ProductGradients<Place.dA.cols> product_gradients_at(void* memory) {
  return {.dAqk = tile_at<Place.dAqk>(memory),
          .dA = tile_at<Place.dA>(memory),
          .diagonal = vector_at<Place.diagonal>(memory)};
}

/// Fills `d` from tiles with dAqk and dA on and below the diagonal, and zeros above it.
template <int Size>
static void take_diagonal(const ProductGradients<Size>& d, int rows) {
  for (int r = 0; r < rows; ++r) {
    d.diagonal[r] = d.dAqk.row(r)[r];
    d.dAqk.row(r)[r] = 0.0F;
  }
  clear_rows(d.dAqk, rows, round_up(rows, 16), Size);
  clear_rows(d.dA, rows, round_up(rows, 16), Size);
}

/// The derivative of load_beta's activation, from its result.
template <bool Sigmoid, bool Negative>
inline float beta_slope(float beta) {
  return Sigmoid ? beta * (1.0F - (Negative ? 0.5F : 1.0F) * beta) : 1.0F;
}

/// One rate a row. A class of rates begins on row r of a tile, gives the rate of the element at
/// `i`, adds a product to the gradient of that rate, and ends the row.
struct RowRates {
  const float* beta;
  float* dbeta;  ///< kLanes partial sums a row

  struct Row {
    float beta;
    f32 dbeta;
    float rate(int64) const { return beta; }
    void add(int64, f32 a, f32 b) { dbeta += a * b; }
  };
  float rate(int r, int64) const { return beta[r]; }
  Row begin(int r) const { return {beta[r], load(dbeta + r * kLanes)}; }
  void end(int r, const Row& row) const { store(dbeta + r * kLanes, row.dbeta); }
};

/// One rate for each element, and their gradients: tiles like those of the keys.
struct ElementRates {
  const float* rates;
  float* gradients;

  struct Row {
    const float* rates;
    float* gradients;
    f32 rate(int64 i) const { return load(rates + i); }
    void add(int64 i, f32 a, f32 b) const { store(gradients + i, load(gradients + i) + a * b); }
  };
  f32 rate(int, int64 i) const { return load(rates + i); }
  Row begin(int) const { return {rates, gradients}; }
  void end(int, const Row&) const {}
};

template <bool Elements>
struct RatesKind {
  using Type = RowRates;
};
template <>
struct RatesKind<true> {
  using Type = ElementRates;
};
/// The rates of a kernel with the constants S.
template <class S>
using RatesOf = typename RatesKind<S::ERASE_WRITE>::Type;

/// Goes over one chunk's pairs of rows, Cols columns at a time.
template <int Size, int Cols, bool Bounded, class Rates = RowRates>
struct IntraBackward {
  KeyTiles<Cols> tiles;
  IntraScratch<Cols> work;
  ProductGradients<Size> d;
  Rates rates;
  const float* ones;  ///< as many as the chunk's rows at most
  int rows, columns;

  /// All pairs with r in [r0, r0 + late), s in [s0, s0 + early) and s < r; `anchor` is the row n.
  void rectangle(int r0, int late, int s0, int early, int anchor) const {
    scale_operands(r0, late, s0, early, tiles.G.row(anchor));
    const Tile<Size> dAqk = d.dAqk.from(r0, s0), dA = d.dA.from(r0, s0);
    multiply(late, columns, early, dAqk, work.early, work.sum_q);
    multiply(late, columns, early, dA, work.early, work.sum_k);
    multiply<Layout::columns>(early, columns, late, dAqk, work.late_q, work.sum);
    multiply_add<Layout::columns>(early, columns, late, dA, work.late_k, work.sum, ones);
    add_late(r0, late);
    add_early(s0, early);
  }

  void scale_operands(int r0, int late, int s0, int early, const float* G_n) const {
    for (int r = 0; r < late; ++r)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = offset(r0 + r, c), j = offset(r, c);
        const f32 E = exp(load(tiles.G.data + i) - load(G_n + c));
        store(work.after.data + j, E);
        store(work.late_q.data + j, E * load(tiles.q.data + i));
        store(work.late_k.data + j, E * (rates.rate(r0 + r, i) * load(tiles.k.data + i)));
      }
    for (int s = 0; s < early; ++s)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = offset(s0 + s, c), j = offset(s, c);
        const f32 E = exp(load(G_n + c) - load(tiles.G.data + i));
        store(work.before.data + j, E);
        store(work.early.data + j, E * load(tiles.k.data + i));
      }
  }

  void add_late(int r0, int late) const {
    for (int r = 0; r < late; ++r) {
      auto row = rates.begin(r0 + r);
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = offset(r0 + r, c), j = offset(r, c);
        const f32 E = load(work.after.data + j);
        const f32 sum_q = load(work.sum_q.data + j), sum_k = load(work.sum_k.data + j);
        const f32 p = E * sum_k;
        row.add(i, load(tiles.k.data + i), p);
        add(tiles.dq, i, E * sum_q);
        add(tiles.dk, i, row.rate(i) * p);
        add(tiles.dG, i, load(work.late_q.data + j) * sum_q + load(work.late_k.data + j) * sum_k);
      }
      rates.end(r0 + r, row);
    }
  }

  void add_early(int s0, int early) const {
    for (int s = 0; s < early; ++s)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = offset(s0 + s, c), j = offset(s, c);
        const f32 sum = load(work.sum.data + j);
        add(tiles.dk, i, load(work.before.data + j) * sum);
        subtract(tiles.dG, i, load(work.early.data + j) * sum);
      }
  }

  /// All pairs among rows first .. end - 1, each with its own exponents.
  void pairs(int first, int end) const {
    for (int r = first + 1; r < end; ++r)
      for (int s = first; s < r; ++s) {
        const float dAqk_rs = d.dAqk.row(r)[s], dA_rs = d.dA.row(r)[s];
        auto row = rates.begin(r);
        for (int c = 0; c < columns; c += kLanes) {
          const int64 i = offset(r, c), j = offset(s, c);
          const f32 E = exp(load(tiles.G.data + i) - load(tiles.G.data + j));
          const f32 early = E * load(tiles.k.data + j), k = load(tiles.k.data + i);
          const f32 late = dAqk_rs * load(tiles.q.data + i) + (dA_rs * row.rate(i)) * k;
          row.add(i, k, dA_rs * early);
          add(tiles.dq, i, dAqk_rs * early);
          add(tiles.dk, i, (dA_rs * row.rate(i)) * early);
          add(tiles.dk, j, E * late);
          add(tiles.dG, i, late * early);
          subtract(tiles.dG, j, late * early);
        }
        rates.end(r, row);
      }
  }

  /// A row's products with itself, which have no gradient of the gate.
  void add_diagonal() const {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = offset(r, c);
        add(tiles.dq, i, d.diagonal[r] * load(tiles.k.data + i));
        add(tiles.dk, i, d.diagonal[r] * load(tiles.q.data + i));
      }
  }

  void run() const {
    for (int first = 0; first < rows; first += 16) {
      const int count = rows - first < 16 ? rows - first : 16;
      if (first > 0) rectangle(first, count, 0, first, first);
      if constexpr (Bounded) {
        rectangle(first, count, first, count, first + count / 2);
      } else {
        if (count > 8) rectangle(first + 8, count - 8, first, 8, first + 8);
        pairs(first, first + (count < 8 ? count : 8));
        pairs(first + 8, first + count);
      }
    }
    add_diagonal();
  }

 private:
  /// The offset of an element of any tile of Cols columns.
  static int64 offset(int row, int column) { return row * Tile<Cols>::kStride + column; }
  static void add(Tile<Cols> to, int64 i, f32 x) { store(to.data + i, load(to.data + i) + x); }
  static void subtract(Tile<Cols> from, int64 i, f32 x) {
    store(from.data + i, load(from.data + i) - x);
  }
};

}  // namespace wyvern::cpu
