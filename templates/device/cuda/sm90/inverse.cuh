// (I + A)^-1 of a 64 x 64 strictly lower triangular A by one warpgroup, of which warp w owns rows
// 16 w to 16 w + 15: blocks of 4 rows by their powers, then by X21 = -X22 A21 X11 from 4 to 8, 16,
// 32 and 64 rows, in fp16 with fp32 accumulators. Powers of larger blocks would not do: where rows
// of A resemble each other they are large and cancel.
#pragma once

#include "device/cuda/mma.cuh"
#include "device/cuda/sm90/inverse_layout.hpp"
#include "device/cuda/sm90/product.cuh"

namespace wyvern::cuda::sm90 {

/// 16 x 16 numbers: as a left operand in fp16, and as accumulators.
using Block = cuda::FragmentA<fp16>;
struct BlockSum {
  cuda::Accumulator x[2];
};

WYVERN_DEVICE Block rounded(const BlockSum& from) { return fragment_a<fp16>(from.x[0], from.x[1]); }

WYVERN_DEVICE Block negated(const BlockSum& from) {
  BlockSum x;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x.x[n].x[i] = within_range<fp16>(-from.x[n].x[i]);
  return rounded(x);
}

/// Writes a block, rounded to T, to a tile.
template <class T, int Rows, int Cols>
WYVERN_DEVICE void store_block(const BlockSum& from, const SwizzledTile<T, Rows, Cols>& to, int row,
                               int col) {
  BlockSum x;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x.x[n].x[i] = within_range<T>(from.x[n].x[i]);
  const cuda::FragmentA<T> block = fragment_a<T>(x.x[0], x.x[1]);
  store_matrix_x4(to.at(row + lane_index() % 16, col + lane_index() / 16 * 8), block.r);
}

/// The right operand of a product that sums over the block's rows.
WYVERN_DEVICE cuda::FragmentB<fp16> right_operand(const Block& x) {
  return {
      {transpose_8x8(x.r[0]), transpose_8x8(x.r[1]), transpose_8x8(x.r[2]), transpose_8x8(x.r[3])}};
}

/// sum += a * b, where both, as their product, are 0 outside the 8 x 8 blocks of the diagonal.
WYVERN_DEVICE void multiply_diagonal(BlockSum& sum, const Block& a, const Block& b) {
  mma_m16n8k16<fp16>(sum.x[0].x, a.r, transpose_8x8(b.r[0]), 0);
  mma_m16n8k16<fp16>(sum.x[1].x, a.r, 0, transpose_8x8(b.r[3]));
}

/// (I - M)^-1 of a strictly lower triangular 16 x 16 block.
WYVERN_DEVICE BlockSum invert_16(const Block& m) {
  const int lane = lane_index();
  const bool in_4 = lane / 16 == lane % 4 / 2;      // of the diagonal's blocks of four rows
  const bool below_4 = lane >= 16 && lane % 4 < 2;  // what joins two of them
  const Block l{{in_4 ? m.r[0] : 0, 0, 0, in_4 ? m.r[3] : 0}};
  BlockSum square;
  multiply_diagonal(square, l, l);
  BlockSum x = square;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const fp16 element{
          static_cast<uint16>(j == 0 ? l.r[3 * half] & 0xFFFFU : l.r[3 * half] >> 16U)};
      x.x[half].x[2 * half + j] += to_float(element) + (lane / 4 == lane % 4 * 2 + j ? 1.0f : 0.0f);
    }
  multiply_diagonal(x, l, rounded(square));
  const Block x4 = rounded(x);
  BlockSum z;
  multiply_diagonal(z, {{below_4 ? m.r[0] : 0, 0, 0, below_4 ? m.r[3] : 0}}, x4);
  multiply_diagonal(x, x4, rounded(z));
  const Block x8 = rounded(x);
  cuda::Accumulator corner;
  mma_m16n8k16<fp16>(corner.x, {0, m.r[1], 0, 0}, transpose_8x8(x8.r[0]), 0);
  mma_m16n8k16<fp16>(x.x[0].x, x8.r, 0, transpose_8x8(pack<fp16>(corner.x[2], corner.x[3])));
  return x;
}

/// One warpgroup's inverse. Barriers: three named ones from `name` on.
struct UnitLowerInverse {
  Tile<fp16, 64, 64> x;
  Tile<fp16, 16, 32> product;
  int name;
  Block left[3];  ///< -A left of the diagonal block: blocks 0 to warp - 1
  Block own;      ///< -A of the diagonal block, then its inverse
  Block before;   ///< of the inverse, left of `own`, in odd warps

  /// The warpgroup's part of a layout that starts at `start`.
  template <InverseLayout Place>
  WYVERN_DEVICE static UnitLowerInverse at(unsigned char* start, int name) {
    return {tile_at<Place.inverse>(start), tile_at<Place.product>(start), name, {}, {}, {}};
  }

  /// Takes a warp's rows of A over; `diagonal` is 0 on and above the diagonal.
  WYVERN_DEVICE void take(const BlockSum (&of_left)[3], const BlockSum& diagonal) {
#pragma unroll
    for (int b = 0; b < 3; ++b) left[b] = negated(of_left[b]);
    own = negated(diagonal);
  }

  /// Writes (I + A)^-1 - I, rounded to T, to the blocks of `to` on and below the diagonal.
  template <class T>
  WYVERN_DEVICE void invert(const SwizzledTile<T, 64, 64>& to, int warp) {
    BlockSum diagonal = invert_16(own);
    own = rounded(diagonal);
    share(own, 16 * warp, 16 * warp);
    if (warp % 2 == 0) arrive_named(name + warp / 2, 64);
    const int lane = lane_index();
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (lane / 4 == lane % 4 * 2 + j) diagonal.x[0].x[j] = diagonal.x[1].x[2 + j] = 0.0f;
    store_block(diagonal, to, 16 * warp, 16 * warp);
    if (warp % 2 != 0) {
      sync_named(name + warp / 2, 64);
      join_16(to, warp);
    }
    sync_named(name + 2, 128);
    if (warp >= 2) join_32(to, warp);
  }

  /// After the last reads of what warps shared: it may be written again.
  WYVERN_DEVICE void release() { sync_named(name + 2, 128); }

 private:
  /// To the other warps.
  WYVERN_DEVICE void share(const Block& block, int row, int col) {
    store_matrix_x4(x.at(row + lane_index() % 16, col + lane_index() / 16 * 8), block.r);
  }
  /// Rows of an odd warp, columns of the warp before.
  template <class T>
  WYVERN_DEVICE void join_16(const SwizzledTile<T, 64, 64>& to, int warp) {
    const int first = 16 * (warp - 1);
    Block a;
#pragma unroll
    for (int i = 0; i < 4; ++i) a.r[i] = warp == 1 ? left[0].r[i] : left[2].r[i];
    BlockSum z, sum;
    multiply<Precision::ieee>(z.x[0], z.x[1], a, load_b(x, first, first));
    multiply<Precision::ieee>(sum.x[0], sum.x[1], own, right_operand(rounded(z)));
    before = rounded(sum);
    share(before, first + 16, first);
    store_block(sum, to, first + 16, first);
  }

  /// Rows of warps 2 and 3, columns 0 to 31.
  template <class T>
  WYVERN_DEVICE void join_32(const SwizzledTile<T, 64, 64>& to, int warp) {
    BlockSum z[2], sum[2];
    multiply<Precision::ieee>(z[0].x[0], z[0].x[1], left[0], load_b(x, 0, 0));
    multiply<Precision::ieee>(z[0].x[0], z[0].x[1], left[1], load_b(x, 16, 0));
    multiply<Precision::ieee>(z[1].x[0], z[1].x[1], left[1], load_b(x, 16, 16));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Block part = rounded(z[half]);
      if (warp == 2)
        store_matrix_x4(product.at(lane_index() % 16, 16 * half + lane_index() / 16 * 8), part.r);
      multiply<Precision::ieee>(sum[half].x[0], sum[half].x[1], own, right_operand(part));
    }
    if (warp == 2) {
      arrive_named(name + 1, 64);
    } else {
      sync_named(name + 1, 64);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        multiply<Precision::ieee>(sum[half].x[0], sum[half].x[1], before,
                                  load_b(product, 0, 16 * half));
    }
    store_block(sum[0], to, 16 * warp, 0);
    store_block(sum[1], to, 16 * warp, 16);
  }
};

}  // namespace wyvern::cuda::sm90
