// The gradients of kda's products inside a chunk. With E_rs,c = exp(G_rc - G_sc) for rows r > s:
//
//   dq_r += sum_s dAqk_rs E_rs k_s      dk_s += sum_r (dAqk_rs q_r + dA_rs beta_r k_r) E_rs
//   dk_r += beta_r p_r,  dbeta_r += k_r . p_r,  with p_r = sum_s dA_rs E_rs k_s
//
// by rectangles of rows r and s with an anchor row n: E_rs = exp(G_r - G_n) exp(G_n - G_s), so that
// each factor rides on one operand of a product. What a pair adds to the gate's gradient in row r
// it takes away in row s; both are made of the same operands, as the sum over later rows that
// follows cancels most of it.
#pragma once

#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"

namespace wyvern::cpu {

/// A chunk's rows of q and k (with their scales), of the gate, and of the gradients: tiles of the
/// same number of columns.
struct KeyTiles {
  float *q, *k, *G;
  float *dq, *dk, *dG;
};

/// What IntraBackward works in.
struct IntraScratch {
  float* after;            ///< 16 rows: exp(G_r - G_n)
  float *late_q, *late_k;  ///< 16 rows: that times q_r, and times beta_r k_r
  float *sum_q, *sum_k;    ///< 16 rows of products with earlier rows
  float* before;           ///< a chunk's rows: exp(G_n - G_s)
  float* early;            ///< that times k_s
  float* sum;              ///< a chunk's rows of products with later rows
};

/// Scratch for chunks of Size rows and Cols columns.
template <int Size, int Cols>
inline IntraScratch take_intra_scratch(Scratch& scratch) {
  const auto strip = [&] { return scratch.tile(16, Cols); };
  const auto chunk = [&] { return scratch.tile(Size, Cols); };
  return {.after = strip(),
          .late_q = strip(),
          .late_k = strip(),
          .sum_q = strip(),
          .sum_k = strip(),
          .before = chunk(),
          .early = chunk(),
          .sum = chunk()};
}

/// Strictly lower parts of dAqk and dA as tiles, zeros elsewhere, and dAqk's diagonal.
struct ProductGradients {
  float *dAqk, *dA, *diagonal;
};

/// Makes `d` of tiles that hold dAqk and dA on and below the diagonal, and zeros above it.
template <int Size>
static void take_diagonal(const ProductGradients& d, int rows) {
  constexpr int64 kRow = row_stride(Size);
  for (int r = 0; r < rows; ++r) {
    d.diagonal[r] = d.dAqk[r * kRow + r];
    d.dAqk[r * kRow + r] = 0.0F;
  }
  clear_rows(d.dAqk, kRow, rows, round_up(rows, 16), Size);
  clear_rows(d.dA, kRow, rows, round_up(rows, 16), Size);
}

/// The derivative of what load_beta applies to beta, from its result.
template <bool Sigmoid, bool Negative>
inline float beta_slope(float beta) {
  return Sigmoid ? beta * (1.0F - (Negative ? 0.5F : 1.0F) * beta) : 1.0F;
}

/// The walk over one chunk's pairs of rows, Cols columns at a time.
template <int Size, int Cols, bool Bounded>
struct IntraBackward {
  static constexpr int64 kRow = row_stride(Cols), kSquare = row_stride(Size);

  KeyTiles tiles;
  IntraScratch work;
  ProductGradients d;
  const float* beta;
  const float* ones;  ///< as many as the chunk's rows at most
  float* dbeta;       ///< kLanes partial sums a row
  int rows, columns;

  /// All pairs with r in [r0, r0 + late), s in [s0, s0 + early) and s < r; `anchor` is the row n.
  void rectangle(int r0, int late, int s0, int early, int anchor) const {
    scale_operands(r0, late, s0, early, tiles.G + anchor * kRow);
    const float* dAqk = d.dAqk + r0 * kSquare + s0;
    const float* dA = d.dA + r0 * kSquare + s0;
    multiply(late, columns, early, dAqk, kSquare, work.early, kRow, work.sum_q, kRow);
    multiply(late, columns, early, dA, kSquare, work.early, kRow, work.sum_k, kRow);
    multiply<Layout::columns>(early, columns, late, dAqk, kSquare, work.late_q, kRow, work.sum,
                              kRow);
    multiply_add<Layout::columns>(early, columns, late, dA, kSquare, work.late_k, kRow, work.sum,
                                  kRow, ones);
    add_late(r0, late);
    add_early(s0, early);
  }

  void scale_operands(int r0, int late, int s0, int early, const float* G_n) const {
    for (int r = 0; r < late; ++r)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = (r0 + r) * kRow + c;
        const f32 E = exp(load(tiles.G + i) - load(G_n + c));
        store(work.after + r * kRow + c, E);
        store(work.late_q + r * kRow + c, E * load(tiles.q + i));
        store(work.late_k + r * kRow + c, E * (beta[r0 + r] * load(tiles.k + i)));
      }
    for (int s = 0; s < early; ++s)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = (s0 + s) * kRow + c;
        const f32 E = exp(load(G_n + c) - load(tiles.G + i));
        store(work.before + s * kRow + c, E);
        store(work.early + s * kRow + c, E * load(tiles.k + i));
      }
  }

  void add_late(int r0, int late) const {
    for (int r = 0; r < late; ++r) {
      f32 row_sum = load(dbeta + (r0 + r) * kLanes);
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = (r0 + r) * kRow + c, j = r * kRow + c;
        const f32 E = load(work.after + j);
        const f32 sum_q = load(work.sum_q + j), sum_k = load(work.sum_k + j);
        const f32 p = E * sum_k;
        row_sum += load(tiles.k + i) * p;
        store(tiles.dq + i, load(tiles.dq + i) + E * sum_q);
        store(tiles.dk + i, load(tiles.dk + i) + beta[r0 + r] * p);
        store(tiles.dG + i,
              load(tiles.dG + i) + (load(work.late_q + j) * sum_q + load(work.late_k + j) * sum_k));
      }
      store(dbeta + (r0 + r) * kLanes, row_sum);
    }
  }

  void add_early(int s0, int early) const {
    for (int s = 0; s < early; ++s)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = (s0 + s) * kRow + c, j = s * kRow + c;
        const f32 sum = load(work.sum + j);
        store(tiles.dk + i, load(tiles.dk + i) + load(work.before + j) * sum);
        store(tiles.dG + i, load(tiles.dG + i) - load(work.early + j) * sum);
      }
  }

  /// All pairs among rows first .. end - 1, each with its own exponents.
  void pairs(int first, int end) const {
    for (int r = first + 1; r < end; ++r)
      for (int s = first; s < r; ++s) {
        const float dAqk_rs = d.dAqk[r * kSquare + s], dA_rs = d.dA[r * kSquare + s];
        f32 row_sum = load(dbeta + r * kLanes);
        for (int c = 0; c < columns; c += kLanes) {
          const int64 i = r * kRow + c, j = s * kRow + c;
          const f32 E = exp(load(tiles.G + i) - load(tiles.G + j));
          const f32 early = E * load(tiles.k + j), k = load(tiles.k + i);
          const f32 late = dAqk_rs * load(tiles.q + i) + (dA_rs * beta[r]) * k;
          row_sum += k * (dA_rs * early);
          store(tiles.dq + i, load(tiles.dq + i) + dAqk_rs * early);
          store(tiles.dk + i, load(tiles.dk + i) + (dA_rs * beta[r]) * early);
          store(tiles.dk + j, load(tiles.dk + j) + E * late);
          store(tiles.dG + i, load(tiles.dG + i) + late * early);
          store(tiles.dG + j, load(tiles.dG + j) - late * early);
        }
        store(dbeta + r * kLanes, row_sum);
      }
  }

  /// A row's products with itself: none of their gradients goes to the gate.
  void add_diagonal() const {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = r * kRow + c;
        store(tiles.dq + i, load(tiles.dq + i) + d.diagonal[r] * load(tiles.k + i));
        store(tiles.dk + i, load(tiles.dk + i) + d.diagonal[r] * load(tiles.q + i));
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
};

}  // namespace wyvern::cpu
