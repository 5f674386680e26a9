// Tiles in the registers of a warpgroup, row by row, with tiles in shared memory: factors of
// rows, dot products of rows, rounding and storing. A thread has parts of two rows of each 64 x N
// accumulator, which it shares with the other three threads of its quad.
#pragma once

#include "device/cuda/sm90/product.cuh"

namespace wyvern::cuda::sm90 {

/// A number for each of this thread's two rows.
struct RowPair {
  float at[2] = {};

  /// From one number a row in shared memory.
  WYVERN_DEVICE static RowPair load(const float* from) {
    return {{from[Accumulator<64>::row(0)], from[Accumulator<64>::row(2)]}};
  }
  WYVERN_DEVICE RowPair operator*(float factor) const { return {{at[0] * factor, at[1] * factor}}; }
  WYVERN_DEVICE RowPair operator*(const RowPair& other) const {
    return {{at[0] * other.at[0], at[1] * other.at[1]}};
  }
  WYVERN_DEVICE RowPair operator+(const RowPair& other) const {
    return {{at[0] + other.at[0], at[1] + other.at[1]}};
  }
  WYVERN_DEVICE RowPair operator-(const RowPair& other) const {
    return {{at[0] - other.at[0], at[1] - other.at[1]}};
  }
  /// Sums over the quads that share rows; all four threads get them.
  WYVERN_DEVICE RowPair over_quads() const {
    RowPair sum;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float two = at[i] + shuffle_xor(at[i], 1);
      sum.at[i] = two + shuffle_xor(two, 2);
    }
    return sum;
  }
  /// One number a row to shared memory; all threads of a quad have the same.
  WYVERN_DEVICE void store(float* to) const {
    if (lane_index() % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) to[Accumulator<64>::row(2 * i)] = at[i];
  }
};

/// Multiplies rows by factors.
template <int N>
WYVERN_DEVICE void scale_rows(Accumulator<N>& x, const RowPair& factor) {
#pragma unroll
  for (int i = 0; i < Accumulator<N>::kCount; ++i) x.x[i] *= factor.at[i / 2 % 2];
}

template <int N>
WYVERN_DEVICE void add(Accumulator<N>& x, const Accumulator<N>& y) {
#pragma unroll
  for (int i = 0; i < Accumulator<N>::kCount; ++i) x.x[i] += y.x[i];
}

/// The place of this lane's address for ldmatrix and stmatrix of 16 columns of the warp's 16 rows:
/// registers are in the order of an accumulator's pairs and of an A fragment.
template <class TileType>
WYVERN_DEVICE typename TileType::Element* fragment_at(const TileType& tile, int column) {
  return tile.at(16 * (warp_index() % 4) + lane_index() % 16, column + lane_index() / 16 * 8);
}

/// Both elements of a register.
template <class T>
WYVERN_DEVICE Float2 unpack(uint32 pair) {
  return {{to_float(T{static_cast<uint16>(pair & 0xFFFFU)}),
           to_float(T{static_cast<uint16>(pair >> 16U)})}};
}

/// Calls act(i, x) for each pair x of neighbours in this thread's two rows of a tile: elements i
/// and i + 1 of an accumulator of its size, of row i / 2 % 2.
template <class TileType, class Act>
WYVERN_DEVICE void visit_pairs(const TileType& tile, Act&& act) {
#pragma unroll
  for (int j = 0; j < TileType::kCols / 16; ++j) {
    uint32 pairs[4];
    load_matrix_x4(pairs, fragment_at(tile, 16 * j));
#pragma unroll
    for (int i = 0; i < 4; ++i) act(8 * j + 2 * i, unpack<typename TileType::Element>(pairs[i]));
  }
}

/// sum_r += x_r . tile_r, this thread's part of it.
template <int N, class TileType>
WYVERN_DEVICE void add_row_dots(RowPair& sum, const Accumulator<N>& x, const TileType& tile) {
  static_assert(N == TileType::kCols);
  visit_pairs(tile, [&](int i, const Float2& y) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
      sum.at[i / 2 % 2] = fused_multiply_add(x.x[i + n], y.at[n], sum.at[i / 2 % 2]);
  });
}

/// x += factor_r tile_r in each row r.
template <int N, class TileType>
WYVERN_DEVICE void add_rows(Accumulator<N>& x, const RowPair& factor, const TileType& tile) {
  static_assert(N == TileType::kCols);
  visit_pairs(tile, [&](int i, const Float2& y) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
      x.x[i + n] = fused_multiply_add(factor.at[i / 2 % 2], y.at[n], x.x[i + n]);
  });
}

/// |tile_r|^2 of this thread's rows.
template <class TileType>
WYVERN_DEVICE RowPair squares_of_rows(const TileType& tile) {
  RowPair sum;
  visit_pairs(tile, [&](int i, const Float2& x) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
      sum.at[i / 2 % 2] = fused_multiply_add(x.at[n], x.at[n], sum.at[i / 2 % 2]);
  });
  return sum.over_quads();
}

/// sum_r += a_r . b_r of two tiles, this thread's part of it.
template <class TileType>
WYVERN_DEVICE void add_row_dots(RowPair& sum, const TileType& a, const TileType& b) {
#pragma unroll
  for (int j = 0; j < TileType::kCols / 16; ++j) {
    uint32 x[4], y[4];
    load_matrix_x4(x, fragment_at(a, 16 * j));
    load_matrix_x4(y, fragment_at(b, 16 * j));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Float2 left = unpack<typename TileType::Element>(x[i]);
      const Float2 right = unpack<typename TileType::Element>(y[i]);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        sum.at[i % 2] = fused_multiply_add(left.at[n], right.at[n], sum.at[i % 2]);
    }
  }
}

/// Writes what an A fragment holds to a tile of its size.
template <class T, int Depth, class TileType>
WYVERN_DEVICE void store_fragment(const TileType& to, const FragmentA<T, Depth>& x) {
#pragma unroll
  for (int j = 0; j < Depth / 16; ++j) store_matrix_x4(fragment_at(to, 16 * j), x.x[j]);
}

/// What was rounded to an A fragment.
template <class T, int Depth>
WYVERN_DEVICE Accumulator<Depth> unpack(const FragmentA<T, Depth>& x) {
  Accumulator<Depth> values;
#pragma unroll
  for (int i = 0; i < Depth / 4; ++i) {
    const Float2 pair = unpack<T>(x.x[i / 4][i % 4]);
    values.x[2 * i] = pair.at[0];
    values.x[2 * i + 1] = pair.at[1];
  }
  return values;
}

/// What a row with this sum of squares is multiplied by to have length 1.
WYVERN_DEVICE float norm_scale(float squares) { return reciprocal_sqrt(squares + 1e-6f); }
/// The same of a row of a tile.
template <class T, int Rows, int Cols>
WYVERN_DEVICE float norm_scale(const SwizzledTile<T, Rows, Cols>& tile, int row) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
  for (int col = 0; col < Cols; col += 8) {
    const auto words = load<4>(reinterpret_cast<const uint32*>(tile.at(row, col)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = to_float(T{static_cast<uint16>(words.at[i] & 0xFFFFU)});
      const float high = to_float(T{static_cast<uint16>(words.at[i] >> 16U)});
      sum[i] = fused_multiply_add(high, high, fused_multiply_add(low, low, sum[i]));
    }
  }
  return norm_scale((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

}  // namespace wyvern::cuda::sm90
