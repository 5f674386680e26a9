// Decays between the rows of a chunk of 64, D_rs = exp(G_r - G_s) for s < r, where a warpgroup's
// accumulator has a number for each pair of rows. A warp's 16 rows reach the columns of earlier
// warps by way of an anchor, the row before their first: both exponents are at most 0 then, and
// the columns' factors are made once for all rows.
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/sm90/inverse.cuh"
#include "device/cuda/sm90/register_tile.cuh"

namespace wyvern::cuda::sm90 {

constexpr int kChunkRows = 64;
constexpr int kAnchors = 3;
/// Columns before the anchors: 16, 32 and 48 of them.
constexpr int kAnchoredColumns = 16 + 32 + 48;
/// Where the columns of the anchor before warp `warp` begin.
WYVERN_DEVICE constexpr int anchored_columns(int warp) { return 8 * warp * (warp - 1); }

/// The sum over lanes up to this one.
WYVERN_DEVICE float running_sum(float x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = shuffle(x, larger(lane_index() - distance, 0));
    if (lane_index() >= distance) x += before;
  }
  return x;
}

/// The running sums of a chunk's log decays in base 2, by one warp: a lane has rows `lane` and
/// `lane` + 32.
struct DecaySums {
  float row[2] = {};
  float anchor[kAnchors] = {};
  float last = 0.0f;

  DecaySums() = default;
  WYVERN_DEVICE explicit DecaySums(const float (&log_decay)[2]) {
    row[0] = running_sum(log_decay[0]) * kLog2E;
    const float half = shuffle(row[0], 31);
    row[1] = half + running_sum(log_decay[1]) * kLog2E;
    anchor[0] = shuffle(row[0], 15);
    anchor[1] = half;
    anchor[2] = shuffle(row[1], 15);
    last = shuffle(row[1], 31);
  }

  /// Writes factors of columns, decayed up to each anchor behind them.
  WYVERN_DEVICE void store_anchored(float* to, const float (&factor)[2]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < kAnchors; ++i) {
        const int r = 32 * n + lane_index();
        if (r < 16 * (i + 1))
          to[anchored_columns(i + 1) + r] = exp2_fast(anchor[i] - row[n]) * factor[n];
      }
  }
};

/// Decays between this thread's rows and columns, times the columns' factors. Not Gated: none
/// decays; not Scaled: the factors are 1.
template <bool Gated = true, bool Scaled = true>
struct Decays {
  using Square = Accumulator<kChunkRows>;

  float reached[2];      ///< from the anchor to the thread's rows
  Float2 column[6];      ///< from the thread's columns to the anchor
  float diagonal[2][4];  ///< in the 16 x 16 on the diagonal

  /// G: running sums in base 2. No branch depends on the warp, so that loads and exponentials of
  /// all blocks are under way together: while products of other warpgroups stream operands, each
  /// wait for shared memory is hundreds of clocks.
  WYVERN_DEVICE Decays(const float* G, const float* factor, const float* anchored, int warp) {
    const float* const left = anchored + anchored_columns(warp);
    const int first = 16 * warp;
    float G_r[2] = {};
    if constexpr (Gated) {
      const float before = G[larger(first - 1, 0)];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        G_r[i] = G[Square::row(2 * i)];
        reached[i] = exp2_fast(G_r[i] - before);
      }
    } else {
      reached[0] = reached[1] = 1.0f;
    }
#pragma unroll
    for (int j = 0; j < 6; ++j)
      column[j] = Gated || Scaled ? load<2>(left + Square::col(4 * j)) : Float2{{1.0f, 1.0f}};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Float2 of_column{{1.0f, 1.0f}};
      Float2 G_s{};
      if constexpr (Scaled) of_column = load<2>(factor + first + Square::col(4 * n));
      if constexpr (Gated) G_s = load<2>(G + first + Square::col(4 * n));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        diagonal[n][i] = Gated ? of_column.at[i % 2] * exp2_fast(G_r[i / 2] - G_s.at[i % 2])
                               : of_column.at[i % 2];
    }
  }
};

/// Below the diagonal x times decays and factors of columns and rows, elsewhere 0, by selection:
/// elements there may be infinite.
WYVERN_DEVICE void decay_strictly_lower(Accumulator<kChunkRows>& x, const Decays<>& decays,
                                        const RowPair& row_factor, int warp) {
  // Predicates per lane: uniform ones would be copied one by one from uniform registers.
  const int own = opaque(warp);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const bool is_left = j / 2 < own;
    const bool is_own = j / 2 == own;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = j % 2 * 8 + lane_index() % 4 * 2 + i % 2;
      const int row = lane_index() / 4 + i / 2 * 8;
      const bool is_own_lower = is_own && column < row;
      const float left =
          j < 6 ? decays.reached[i / 2] * decays.column[j < 6 ? j : 0].at[i % 2] : 0.0f;
      const float factor = row_factor.at[i / 2] * (is_own ? decays.diagonal[j % 2][i] : left);
      float& value = x.x[4 * j + i];
      value = is_left || is_own_lower ? value * factor : 0.0f;
    }
  }
}

/// The diagonal of x: each thread has its two rows'.
WYVERN_DEVICE RowPair diagonal_of(const Accumulator<kChunkRows>& x, int warp) {
  const int own = opaque(warp);
  const int row = lane_index() / 4;
  RowPair diagonal;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float pair[2] = {};
#pragma unroll
    for (int block = 0; block < 4; ++block)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (block == own) pair[i] = x.x[8 * block + 6 * half + i];
    diagonal.at[half] = shuffle(row % 2 == 0 ? pair[0] : pair[1], 4 * row + row / 2);
  }
  return diagonal;
}

/// A warp's lower part of its sixteen rows: the blocks of 16 x 16 left of the diagonal's (only the
/// first `warp` of them count), and the diagonal's.
struct LowerRows {
  BlockSum left[3], diagonal;
};

/// Element i of the n-th eight columns of the block on the diagonal.
WYVERN_DEVICE float on_diagonal(const Accumulator<kChunkRows>& x, const bool (&is_warp)[4], int n,
                                int i) {
  float value = x.x[4 * n + i];
#pragma unroll
  for (int other = 1; other < 4; ++other)
    if (is_warp[other]) value = x.x[8 * other + 4 * n + i];
  return value;
}

/// The lower part of x times decays and factors of rows; the diagonal's block is 0 above the
/// diagonal, and with Strict on it.
template <bool Strict, class Decays>
WYVERN_DEVICE LowerRows lower_rows(const Accumulator<kChunkRows>& x, const Decays& decays, int warp,
                                   const float (&factor)[2]) {
  LowerRows lower;
#pragma unroll
  for (int j = 0; j < 6; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      lower.left[j / 2].x[j % 2].x[i] =
          x.x[4 * j + i] * (factor[i / 2] * decays.reached[i / 2]) * decays.column[j].at[i % 2];
  // Predicates per lane: uniform ones would be copied one by one from uniform registers.
  const int own = opaque(warp);
  const bool is_warp[4] = {own == 0, own == 1, own == 2, own == 3};
  // Above the diagonal's blocks of 8 x 8 there is nothing, and below all counts.
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int right = lane_index() % 4 * 2 + j - lane_index() / 4;
      const float value = on_diagonal(x, is_warp, half, 2 * half + j) *
                          (factor[half] * decays.diagonal[half][2 * half + j]);
      lower.diagonal.x[half].x[2 * half + j] = right > (Strict ? -1 : 0) ? 0.0f : value;
    }
#pragma unroll
  for (int i = 2; i < 4; ++i)
    lower.diagonal.x[0].x[i] = on_diagonal(x, is_warp, 0, i) * (factor[1] * decays.diagonal[0][i]);
  return lower;
}

/// Rows of this warp, from `first`, on and below the diagonal, rounded.
template <class SquareTile>
WYVERN_DEVICE void store_lower(const LowerRows& x, const SquareTile& to, int warp, int first) {
#pragma unroll
  for (int s = 0; s < 3; ++s)
    if (s < warp) store_block(x.left[s], to, first, 16 * s);
  store_block(x.diagonal, to, first, first);
}

WYVERN_DEVICE void store_negated(const LowerRows& x, const Tile<fp16, kChunkRows, kChunkRows>& to,
                                 int warp) {
  const int first = opaque(16 * warp);
  // One address and constants from it: registers are few.
  fp16* const rows = to.at(first + lane_index() % 16, lane_index() / 16 * 8);
#pragma unroll
  for (int s = 0; s < 3; ++s)
    if (s < warp) store_matrix_x4(rows + 16 * s, negated(x.left[s]).r);
  store_matrix_x4(rows + first, negated(x.diagonal).r);
}

}  // namespace wyvern::cuda::sm90
