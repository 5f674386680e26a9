// Decays between the rows of a chunk of 64, D_rs = exp(G_r - G_s) for s < r, where a warpgroup's
// accumulator has a number for each pair of rows. A warp's 16 rows reach the columns of earlier
// warps by way of an anchor, the row before their first: both exponents are at most 0 then, and
// the columns' factors are made once for all rows.
#pragma once

#include "device/cuda/chunk.cuh"
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
  float row[2];
  float anchor[kAnchors];
  float last;

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

/// Decays between this thread's rows and columns, times the columns' factors.
struct Decays {
  using Square = Accumulator<kChunkRows>;

  float reached[2];      ///< from the anchor to the thread's rows
  Float2 column[6];      ///< from the thread's columns to the anchor
  float diagonal[2][4];  ///< in the 16 x 16 on the diagonal

  /// G: running sums in base 2. No branch depends on the warp, so that all loads and exponentials
  /// are under way together.
  WYVERN_DEVICE Decays(const float* G, const float* factor, const float* anchored, int warp) {
    const int first = 16 * warp;
    const float before = G[larger(first - 1, 0)];
    float G_r[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      G_r[i] = G[Square::row(2 * i)];
      reached[i] = exp2_fast(G_r[i] - before);
    }
#pragma unroll
    for (int j = 0; j < 6; ++j)
      column[j] = load<2>(anchored + anchored_columns(warp) + Square::col(4 * j));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Float2 of_column = load<2>(factor + first + Square::col(4 * n));
      const Float2 G_s = load<2>(G + first + Square::col(4 * n));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        diagonal[n][i] = of_column.at[i % 2] * exp2_fast(G_r[i / 2] - G_s.at[i % 2]);
    }
  }
};

/// Below the diagonal x times decays and factors of columns and rows, elsewhere 0: chosen, so that
/// what is there (infinities too) does not matter.
WYVERN_DEVICE void decay_strictly_lower(Accumulator<kChunkRows>& x, const Decays& decays,
                                        const RowPair& row_factor, int warp) {
  // Choices by lanes: those that all lanes have alike are copied one by one from uniform registers.
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

}  // namespace wyvern::cuda::sm90
