// A chunk of gdn2 in shared memory. Where kda has a factor beta a row it has gates of one number an
// element, so its rows' factors of beta are 1: keys erase as erase k, and values enter as write v.
#pragma once

#include "device/cuda/gdn2_layout.hpp"
#include "device/cuda/kda_wy.cuh"

namespace wyvern::cuda::gdn2 {

/// Both numbers of a times those of b.
WYVERN_DEVICE Float2 product(const Float2& a, const Float2& b) {
  return {{a.at[0] * b.at[0], a.at[1] * b.at[1]}};
}

/// Products of two LaneRows.
template <class A, class B>
struct LaneProducts {
  A a;
  B b;

  WYVERN_DEVICE Float2 low() const { return product(a.low(), b.low()); }
  WYVERN_DEVICE Float2 high() const { return product(a.high(), b.high()); }
};
template <class A, class B>
LaneProducts(A, B) -> LaneProducts<A, B>;

/// Size rows and Cols columns of a chunk's q, k, Gk and erase: a tile for kda's blocks.
template <class T, class Gate, int Size, int Cols>
struct KeyTile {
  static constexpr int kCols = Cols;

  Tile<T, Size, Cols> q, k;
  Tile<float, Size, Cols> G;
  Tile<Gate, Size, Cols> gate;

  WYVERN_DEVICE float erasing(int r, int c) const {
    return to_float(*gate.at(r, c)) * to_float(*k.at(r, c));
  }
  WYVERN_DEVICE Float2 erasing_two(int r, int c) const {
    return product(kda::load_pair(gate, r, c), kda::load_pair(k, r, c));
  }
  WYVERN_DEVICE auto erasing_rows(int r, int c) const {
    return LaneProducts{kda::lane_rows(gate, r, c), kda::lane_rows(k, r, c)};
  }
};

/// The tile that a layout which starts at `start` has in Place.
template <KeyPlace Place>
WYVERN_DEVICE auto keys_at(unsigned char* start) {
  constexpr kda::KeyPlace kKeys = Place.keys;
  return KeyTile<Element<kKeys.q.type>, Element<Place.erase.type>, kKeys.q.rows, kKeys.q.cols>{
      tile_at<kKeys.q>(start), tile_at<kKeys.k>(start), tile_at<kKeys.G>(start),
      tile_at<Place.erase>(start)};
}

/// Starts copying a tile: `rows` rows and `cols` columns that count.
///
template <int Threads, int Key, class T, class Gate, int Size, int Cols>
WYVERN_DEVICE void load_keys(const KeyTile<T, Gate, Size, Cols>& to, const TokenRows<const T>& q,
                             const TokenRows<const T>& k, const TokenRows<const float>& Gk,
                             const TokenRows<const Gate>& erase, int rows, int cols) {
  load_tile<Threads, Key>(to.q, q, rows, cols);
  load_tile<Threads, Key>(to.k, k, rows, cols);
  load_tile<Threads, Key>(to.G, Gk, rows, cols);
  load_tile<Threads, Key>(to.gate, erase, rows, cols);
}

/// Size rows and Cols columns of a chunk's v and write.
template <class T, class Gate, int Size, int Cols>
struct ValueTile {
  Tile<T, Size, Cols> v;
  Tile<Gate, Size, Cols> gate;

  /// write v in rows row..row+15 and columns col..col+7.
  WYVERN_DEVICE Accumulator product(int row, int col) const {
    Accumulator x;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + accumulator_row(2 * half);
      const int c = col + accumulator_col(0);
      const Float2 x_r = gdn2::product(kda::load_pair(gate, r, c), kda::load_pair(v, r, c));
      x.x[2 * half] = x_r.at[0];
      x.x[2 * half + 1] = x_r.at[1];
    }
    return x;
  }
};

template <ValuePlace Place>
WYVERN_DEVICE auto values_at(unsigned char* start) {
  return ValueTile<Element<Place.v.type>, Element<Place.write.type>, Place.v.rows, Place.v.cols>{
      tile_at<Place.v>(start), tile_at<Place.write>(start)};
}

/// Starts copying a tile, `rows` rows and `cols` columns that count, of heads of Value elements.
template <int Threads, int Value, class T, class Gate, int Size, int Cols>
WYVERN_DEVICE void load_values(const ValueTile<T, Gate, Size, Cols>& to,
                               const TokenRows<const T>& v, const TokenRows<const Gate>& write,
                               int rows, int cols) {
  load_tile<Threads, Value>(to.v, v, rows, cols);
  load_tile<Threads, Value>(to.gate, write, rows, cols);
}

/// `x` kept within the range of T.
template <class T>
WYVERN_DEVICE Accumulator within_range(const Accumulator& x) {
  Accumulator y;
#pragma unroll
  for (int i = 0; i < 4; ++i) y.x[i] = cuda::within_range<T>(x.x[i]);
  return y;
}

/// Writes sixteen columns of U = Tinv (write v), the tile's from `col`, to `to`, for a chunk of
/// `rows`: those before `cols`, of which there is at least one. The inverse comes with factors of
/// 1; where it has two parts, products of v are not rounded either.
template <Precision P, int Align, class T, class Gate, int Size, int Parts, int Cols, class Out>
WYVERN_DEVICE void write_values(const kda::InverseOperand<T, Size, Parts>& inverse,
                                const ValueTile<T, Gate, Size, Cols>& tile, int col, Out* to,
                                int64 stride, int rows, int cols) {
  Accumulator u[Size / 16][2];
  if constexpr (kHalf<T>) {
#pragma unroll
    for (int depth = 0; depth < Size / 16; ++depth) {
      if (depth * 16 >= rows) break;
      const Accumulator x[2] = {within_range<T>(tile.product(depth * 16, col)),
                                within_range<T>(tile.product(depth * 16, col + 8))};
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) u[depth][n].x[i] += x[n].x[i];
      const FragmentB<T> b = kda::fragment_b<T>(x[0], x[1]);
#pragma unroll
      for (int strip = depth; strip < Size / 16; ++strip)
#pragma unroll
        for (int part = 0; part < Parts; ++part)
          multiply<P>(u[strip][0], u[strip][1], inverse.a[part][inverse.index(strip, depth * 16)],
                      b);
      if constexpr (Parts == 2) {
        const FragmentB<T> rest = kda::fragment_b<T>(rounded_off<T>(x[0]), rounded_off<T>(x[1]));
#pragma unroll
        for (int strip = depth; strip < Size / 16; ++strip)
          multiply<P>(u[strip][0], u[strip][1], inverse.a[0][inverse.index(strip, depth * 16)],
                      rest);
      }
    }
  } else {
    inverse.template add<P>(u, [&](int depth) {
      FragmentB<float> b = load_b(tile.v, depth, col);
      const FragmentB<float> gate = load_b(tile.gate, depth, col);
#pragma unroll
      for (int i = 0; i < 4; ++i) b.r[i] *= gate.r[i];
      return b;
    });
  }
#pragma unroll
  for (int strip = 0; strip < Size / 16; ++strip)
    store_pair<Align>(to + strip * 16 * stride, stride, u[strip][0], u[strip][1], rows - strip * 16,
                      cols);
}

}  // namespace wyvern::cuda::gdn2
