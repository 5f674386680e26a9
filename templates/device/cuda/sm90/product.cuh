// Products of swizzled tiles by one warpgroup.
#pragma once

#include "device/cuda/sm90/tile.cuh"

namespace wyvern::cuda::sm90 {

/// 64 x N numbers in the registers of a warpgroup. Four in a row are an accumulator
/// of mma_m16n8k16, for the 16 rows of each warp.
template <int N>
struct Accumulator {
  static constexpr int kCount = N / 2;
  float x[kCount] = {};

  /// Row and column of x[i] in this thread.
  WYVERN_DEVICE static int row(int i) {
    return warp_index() % 4 * 16 + lane_index() / 4 + i / 2 % 2 * 8;
  }
  WYVERN_DEVICE static int col(int i) { return i / 4 * 8 + lane_index() % 4 * 2 + i % 2; }
};

/// A tile as an operand: with Major::k its rows are the tile's rows from `first`, the depth runs
/// along the columns from `depth`; with Major::mn rows and columns change places.
template <Major M, class TileType>
struct Operand {
  static constexpr Major kMajor = M;
  using Element = typename TileType::Element;
  TileType tile;
  int first;
  int depth;

  /// The 16 that are `step` * 16 deeper.
  WYVERN_DEVICE Descriptor at(int step) const {
    if constexpr (M == Major::k)
      return tile.by_rows(first, depth + step * 16);
    else
      return tile.by_columns(first, depth + step * 16);
  }
};
template <class TileType>
WYVERN_DEVICE Operand<Major::k, TileType> rows_of(const TileType& tile, int first = 0,
                                                  int depth = 0) {
  return {tile, first, depth};
}
template <class TileType>
WYVERN_DEVICE Operand<Major::mn, TileType> columns_of(const TileType& tile, int first = 0,
                                                      int depth = 0) {
  return {tile, first, depth};
}

/// What a warpgroup does before products: registers and shared memory as they are now are theirs.
template <int N>
WYVERN_DEVICE void begin_products(Accumulator<N>& d) {
  pin(d.x);
  wgmma_fence();
}
/// Waits until at most Pending committed groups are under way; d is of one that is done, and so are
/// the operands in registers, which are free then.
template <int Pending, int N, class... Operands>
WYVERN_DEVICE void end_products(Accumulator<N>& d, Operands&... operands) {
  wgmma_wait<Pending>();
  pin(d.x);
  (operands.hold(), ...);
}

/// Starts d = a * b^T, summed over Depth; added to d where `accumulate`. 64 rows of a, N of b.
template <int Depth, int N, Major A, Major B, class TileA, class TileB>
WYVERN_DEVICE void multiply(Accumulator<N>& d, const Operand<A, TileA>& a,
                            const Operand<B, TileB>& b, bool accumulate) {
#pragma unroll
  for (int step = 0; step < Depth / 16; ++step)
    wgmma<typename TileA::Element, N, A, B>(d.x, a.at(step), b.at(step), accumulate || step > 0);
}

/// A 64 x Depth operand A in registers: one A fragment of each 16 columns.
template <class T, int Depth>
struct FragmentA {
  uint32 x[Depth / 16][4];

  FragmentA() = default;
  /// Rounded from an accumulator, whose layout it has.
  WYVERN_DEVICE explicit FragmentA(const Accumulator<Depth>& from) {
#pragma unroll
    for (int i = 0; i < Depth / 4; ++i) x[i / 4][i % 4] = pack<T>(from.x[2 * i], from.x[2 * i + 1]);
  }
  /// What rounding to `rounded` left of `from`, rounded itself.
  WYVERN_DEVICE FragmentA(const Accumulator<Depth>& from, const FragmentA& rounded) {
#pragma unroll
    for (int i = 0; i < Depth / 4; ++i) {
      const uint32 pair = rounded.x[i / 4][i % 4];
      const T low{static_cast<uint16>(pair & 0xFFFFU)};
      const T high{static_cast<uint16>(pair >> 16U)};
      x[i / 4][i % 4] = pack<T>(from.x[2 * i] - to_float(low), from.x[2 * i + 1] - to_float(high));
    }
  }
  /// After the wait for the product that reads it: until then its registers are not free.
  WYVERN_DEVICE void hold() {
#pragma unroll
    for (int step = 0; step < Depth / 16; ++step) pin(x[step]);
  }
};

/// The same with A in registers.
template <int N, class T, int Depth, Major B, class TileB>
WYVERN_DEVICE void multiply(Accumulator<N>& d, const FragmentA<T, Depth>& a,
                            const Operand<B, TileB>& b, bool accumulate) {
#pragma unroll
  for (int step = 0; step < Depth / 16; ++step)
    wgmma<T, N, B>(d.x, a.x[step], b.at(step), accumulate || step > 0);
}

/// Starts d = a b^T, or d += a b^T, as a group of its own: until its end_products() nothing may
/// touch d, nor what a and b are of.
template <int Depth, int N, Major A, Major B, class TileA, class TileB>
WYVERN_DEVICE void start_product(Accumulator<N>& d, const Operand<A, TileA>& a,
                                 const Operand<B, TileB>& b, bool accumulate = false) {
  begin_products(d);
  multiply<Depth>(d, a, b, accumulate);
  wgmma_commit();
}
template <int N, class T, int Depth, Major B, class TileB>
WYVERN_DEVICE void start_product(Accumulator<N>& d, const FragmentA<T, Depth>& a,
                                 const Operand<B, TileB>& b, bool accumulate = false) {
  begin_products(d);
  multiply(d, a, b, accumulate);
  wgmma_commit();
}

}  // namespace wyvern::cuda::sm90
