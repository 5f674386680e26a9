// The tile product, which takes nearly all of the time.
#pragma once

#include "device/cpu/tile.hpp"

namespace wyvern::cpu {

/// How A is laid out: element (i, p) at a[i * lda + p], or at a[p * lda + i].
enum class Layout { rows, columns };

/// What is zero or not needed above a diagonal: nothing, A's part (p > i), B's part (j > p), or the
/// result's (j > i), which is then not written outside the diagonal's blocks. a_transposed: A is a
/// lower triangle's transpose, its part below the diagonal (p < i) is zero.
enum class Lower { none, a, a_transposed, b, c };

namespace detail {

/// One register tile: kTileRows rows, `Vectors` vectors wide.
template <Layout L, int Vectors, bool Accumulate>
inline void product_block(int begin, int end, const float* a, int64 lda, const float* b, int64 ldb,
                          float* c, int64 ldc, const float* row_scale) {
  f32 acc[kTileRows][Vectors] = {};
  for (int p = begin; p < end; ++p) {
    f32 row[Vectors];
#pragma clang loop unroll(full)
    for (int j = 0; j < Vectors; ++j) row[j] = load(b + p * ldb + j * kLanes);
#pragma clang loop unroll(full)
    for (int i = 0; i < kTileRows; ++i) {
      const float x = L == Layout::rows ? a[i * lda + p] : a[p * lda + i];
#pragma clang loop unroll(full)
      for (int j = 0; j < Vectors; ++j) acc[i][j] += x * row[j];
    }
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < kTileRows; ++i) {
#pragma clang loop unroll(full)
    for (int j = 0; j < Vectors; ++j) {
      float* to = c + i * ldc + j * kLanes;
      store(to, Accumulate ? load(to) * row_scale[i] + acc[i][j] : acc[i][j]);
    }
  }
}

/// c = a b, or c_i = row_scale_i c_i + (a b)_i where `Accumulate`.
template <Layout L, Lower Zero, bool Accumulate>
[[gnu::noinline]] static void product(int rows, int columns, int depth, const float* a, int64 lda,
                                      const float* b, int64 ldb, float* c, int64 ldc,
                                      const float* row_scale) {
  for (int j = 0; j < columns; j += 2 * kLanes) {
    const int begin = Zero == Lower::b ? j : 0;
    for (int i = Zero == Lower::c ? j / kTileRows * kTileRows : 0; i < rows; i += kTileRows) {
      const int first = Zero == Lower::a_transposed ? i : begin;
      const int end = Zero == Lower::a && i + kTileRows < depth ? i + kTileRows : depth;
      const int wanted = Zero == Lower::c && i + kTileRows < columns ? i + kTileRows : columns;
      const float* tile_a = a + (L == Layout::rows ? i * lda : i);
      float* tile_c = c + i * ldc + j;
      const float* scale = Accumulate ? row_scale + i : nullptr;
      if (wanted - j > kLanes)
        detail::product_block<L, 2, Accumulate>(first, end, tile_a, lda, b + j, ldb, tile_c, ldc,
                                                scale);
      else
        detail::product_block<L, 1, Accumulate>(first, end, tile_a, lda, b + j, ldb, tile_c, ldc,
                                                scale);
    }
  }
}

}  // namespace detail

/// c = a b, for a (rows x depth), b (depth x columns), c (rows x columns). Rows are rounded up to
/// whole kTileRows: the caller's tiles have them. Columns are rounded up to whole vectors.
template <Layout L = Layout::rows, Lower Zero = Lower::none, int A, int B, int C>
static void multiply(int rows, int columns, int depth, Tile<A> a, Tile<B> b, Tile<C> c) {
  detail::product<L, Zero, false>(rows, columns, depth, a.data, a.kStride, b.data, b.kStride,
                                  c.data, c.kStride, nullptr);
}

/// c_i = row_scale_i c_i + (a b)_i.
template <Layout L = Layout::rows, Lower Zero = Lower::none, int A, int B, int C>
static void multiply_add(int rows, int columns, int depth, Tile<A> a, Tile<B> b, Tile<C> c,
                         const float* row_scale) {
  detail::product<L, Zero, true>(rows, columns, depth, a.data, a.kStride, b.data, b.kStride, c.data,
                                 c.kStride, row_scale);
}

}  // namespace wyvern::cpu
