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

#include "common/cpu/chunk.hpp"
#include "common/cpu/product.hpp"

/// Rows of q and k (with their scales), of the gate, and of the gradients that are added to. Tiles
/// of the same number of columns.
struct IntraTiles {
  float *q, *k, *G;
  float *dq, *dk, *dG;
  float *late_q, *late_k;  ///< 16 rows: exp(G_r - G_n) q_r, exp(G_r - G_n) beta_r k_r
  float *sum_q, *sum_k;    ///< 16 rows of products with earlier rows
  float *early;            ///< a chunk's rows: exp(G_n - G_s) k_s
  float *sum;              ///< a chunk's rows of products with later rows
};

/// Strictly lower parts of dAqk and dA as tiles, zeros elsewhere, and dAqk's diagonal.
struct ProductGradients {
  float *dAqk, *dA, *diagonal;
};

/// dAqk and dA as the tensors hold them, `stride` floats between rows of `Size`, to tiles.
template <int Size>
static void load_product_gradients(const float* dAqk, const float* dA, int64 stride, int rows,
                                   const ProductGradients& to) {
  constexpr int64 kRow = row_stride(Size);
  const i32 lanes = lane_numbers();
  for (int r = 0; r < rows; ++r) {
    to.diagonal[r] = dAqk[r * stride + r];
    for (int s = 0; s < Size; s += kLanes) {
      store(to.dAqk + r * kRow + s, lanes < r - s ? load(dAqk + r * stride + s) : f32{});
      store(to.dA + r * kRow + s, lanes < r - s ? load(dA + r * stride + s) : f32{});
    }
  }
  clear_rows(to.dAqk, kRow, rows, round_up(rows, 16), Size);
  clear_rows(to.dA, kRow, rows, round_up(rows, 16), Size);
}

/// The walk over one chunk's pairs of rows, Cols columns at a time.
template <int Size, int Cols, bool Bounded>
struct IntraBackward {
  static constexpr int64 kRow = row_stride(Cols), kSquare = row_stride(Size);

  IntraTiles tiles;
  ProductGradients d;
  const float* beta;
  float* dbeta;  ///< kLanes partial sums a row
  int rows, columns;

  /// All pairs with r in [r0, r0 + late), s in [s0, s0 + early) and s < r; `anchor` is the row n.
  void rectangle(int r0, int late, int s0, int early, int anchor) const {
    scale_operands(r0, late, s0, early, tiles.G + anchor * kRow);
    const float* dAqk = d.dAqk + r0 * kSquare + s0;
    const float* dA = d.dA + r0 * kSquare + s0;
    multiply(late, columns, early, dAqk, kSquare, tiles.early, kRow, tiles.sum_q, kRow);
    multiply(late, columns, early, dA, kSquare, tiles.early, kRow, tiles.sum_k, kRow);
    multiply<Layout::columns>(early, columns, late, dAqk, kSquare, tiles.late_q, kRow, tiles.sum,
                              kRow);
    float ones[Size];
    for (int s = 0; s < Size; ++s) ones[s] = 1.0F;
    multiply_add<Layout::columns>(early, columns, late, dA, kSquare, tiles.late_k, kRow, tiles.sum,
                                  kRow, ones);
    add_late(r0, late, tiles.G + anchor * kRow);
    add_early(s0, early, tiles.G + anchor * kRow);
  }

  void scale_operands(int r0, int late, int s0, int early, const float* G_n) const {
    for (int r = 0; r < late; ++r)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = (r0 + r) * kRow + c;
        const f32 E = exp(load(tiles.G + i) - load(G_n + c));
        store(tiles.late_q + r * kRow + c, E * load(tiles.q + i));
        store(tiles.late_k + r * kRow + c, E * (beta[r0 + r] * load(tiles.k + i)));
      }
    for (int s = 0; s < early; ++s)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = (s0 + s) * kRow + c;
        store(tiles.early + s * kRow + c,
              exp(load(G_n + c) - load(tiles.G + i)) * load(tiles.k + i));
      }
  }

  void add_late(int r0, int late, const float* G_n) const {
    for (int r = 0; r < late; ++r) {
      f32 row_sum = load(dbeta + (r0 + r) * kLanes);
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = (r0 + r) * kRow + c, j = r * kRow + c;
        const f32 E = exp(load(tiles.G + i) - load(G_n + c));
        const f32 sum_q = load(tiles.sum_q + j), sum_k = load(tiles.sum_k + j);
        const f32 p = E * sum_k;
        row_sum += load(tiles.k + i) * p;
        store(tiles.dq + i, load(tiles.dq + i) + E * sum_q);
        store(tiles.dk + i, load(tiles.dk + i) + beta[r0 + r] * p);
        store(tiles.dG + i, load(tiles.dG + i) + (load(tiles.late_q + j) * sum_q +
                                                  load(tiles.late_k + j) * sum_k));
      }
      store(dbeta + (r0 + r) * kLanes, row_sum);
    }
  }

  void add_early(int s0, int early, const float* G_n) const {
    for (int s = 0; s < early; ++s)
      for (int c = 0; c < columns; c += kLanes) {
        const int64 i = (s0 + s) * kRow + c, j = s * kRow + c;
        const f32 sum = load(tiles.sum + j);
        store(tiles.dk + i,
              load(tiles.dk + i) + exp(load(G_n + c) - load(tiles.G + i)) * sum);
        store(tiles.dG + i, load(tiles.dG + i) - load(tiles.early + j) * sum);
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
