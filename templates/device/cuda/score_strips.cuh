// A chunk's scores times the rows of a tile, for blocks of BV value columns of one chunk and value
// head. A warp has strips of 16 of the chunk's rows, and with more warps than strips a part of the
// columns; the scores of its rows are in its registers. S is the kernel's Spec.
#pragma once

#include "device/cuda/mma.cuh"

namespace wyvern::cuda {

/// Rest of a dimension that tiles of Size columns cover, where that is not known to be enough.
template <int Dimension, int Size>
WYVERN_DEVICE int rest_from(int first) {
  return Dimension % Size == 0 ? Size : Dimension - first;
}

/// Which scores are not 0: those on and below the diagonal, or on and above it.
enum class Triangle { lower, upper };

template <class S>
struct ScoreStrips {
  static constexpr int kStrips = larger(S::BT / 16 / S::num_warps, 1);  ///< of a warp
  static constexpr int kWarpsDown = S::BT / 16 / kStrips;
  static constexpr int kCols = S::BV / (S::num_warps / kWarpsDown);  ///< of a warp
  static constexpr int kPairs = kCols / 8;
  using Type = Element<S::DTYPE>;
  using Scores = Accumulator[kStrips][S::BT / 8];
  using Columns = Accumulator[kStrips][kPairs];

  int first_strip = warp_index() % kWarpsDown;
  int first_col = warp_index() / kWarpsDown * kCols;

  /// The first row of this warp's strip `i`.
  WYVERN_DEVICE int row(int i) const { return (first_strip + i * kWarpsDown) * 16; }

  /// out += scores rows. 16-bit scores enter as head and rest: their rounding would be the largest
  /// error of short sequences, and these kernels wait for memory, not for products.
  template <Triangle NotZero, class TileType>
  WYVERN_DEVICE void multiply(Columns& out, const Scores& scores, const TileType& rows) const {
    constexpr int kStep = kDepth<Type>;
#pragma unroll
    for (int step = 0; step < S::BT / kStep; ++step) {
      if (NotZero == Triangle::lower && step * kStep >= row(kStrips - 1) + 16) break;
      if (NotZero == Triangle::upper && (step + 1) * kStep <= row(0)) continue;
      FragmentA<Type> a[kStrips], rest[kStrips];
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        a[i] = fragment_a<Type>(scores[i], step);
        if constexpr (kHalf<Type>) rest[i] = fragment_a_rest(scores[i], step, a[i]);
      }
#pragma unroll
      for (int n = 0; n < kPairs; n += 2) {
        const auto b = load_b(rows, step * kStep, first_col + n * 8);
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          if constexpr (kHalf<Type>)
            cuda::multiply<S::precision>(out[i][n], out[i][n + 1], rest[i], b);
          cuda::multiply<S::precision>(out[i][n], out[i][n + 1], a[i], b);
        }
      }
    }
  }

  /// Stores out times `scale` to `rows` rows of a tensor [., heads, V] from row `first` on, whose
  /// columns start at `first_v`.
  WYVERN_DEVICE void store(Columns& out, float scale, Type* to, int64 first, int heads, int rows,
                           int first_v) const {
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      Type* const strip = to + (first + int64{row(i)} * heads) * S::V + first_v + first_col;
#pragma unroll
      for (int n = 0; n < kPairs; n += 2) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          out[i][n].x[j] *= scale;
          out[i][n + 1].x[j] *= scale;
        }
        store_pair<S::V>(strip + n * 8, heads * S::V, out[i][n], out[i][n + 1], rows - row(i),
                         rest_from<S::V, S::BV>(first_v + first_col + n * 8));
      }
    }
  }
};

}  // namespace wyvern::cuda
