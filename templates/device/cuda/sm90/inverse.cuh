// (I + A)^-1 of a 64 x 64 strictly lower triangular A, by one warpgroup whose warp w owns rows
// 16 w to 16 w + 15, or by three warps: blocks of 4 rows by their powers, then by X21 = -X22 A21
// X11 from 4 to 8, 16, 32 and 64 rows, in fp16 with fp32 accumulators. Powers of larger blocks
// would not do: where rows of A resemble each other they are large and cancel.
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
  Block block;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const x = from.x[i / 2].x + i % 2 * 2;
    block.r[i] = pack_within_range<fp16>(-x[0], -x[1]);
  }
  return block;
}

/// Writes a block, rounded to T, to a tile.
template <class T, int Rows, int Cols>
WYVERN_DEVICE void store_block(const BlockSum& from, const SwizzledTile<T, Rows, Cols>& to, int row,
                               int col) {
  uint32 rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const x = from.x[i / 2].x + i % 2 * 2;
    rows[i] = pack_within_range<T>(x[0], x[1]);
  }
  store_matrix_x4(to.at(row + lane_index() % 16, col + lane_index() / 16 * 8), rows);
}

/// A tile whose columns are scaled as they are written.
template <class TileType>
struct ScaledColumns {
  TileType tile;
  const float* factors;  ///< of each column
};
template <class TileType>
WYVERN_DEVICE void store_block(BlockSum from, const ScaledColumns<TileType>& to, int row, int col) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const Float2 factor = load<2>(to.factors + col + 8 * n + lane_index() % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) from.x[n].x[i] *= factor.at[i % 2];
  }
  store_block(from, to.tile, row, col);
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

WYVERN_DEVICE void share_block(const Block& block, const Tile<fp16, 64, 64>& to, int row, int col) {
  store_matrix_x4(to.at(row + lane_index() % 16, col + lane_index() / 16 * 8), block.r);
}

/// Less the identity, as the inverse is written.
WYVERN_DEVICE void subtract_identity(BlockSum& diagonal) {
  const int lane = lane_index();
#pragma unroll
  for (int j = 0; j < 2; ++j)
    if (lane / 4 == lane % 4 * 2 + j) diagonal.x[0].x[j] = diagonal.x[1].x[2 + j] = 0.0f;
}

/// (I - M)^-1 in the place of M for the four strictly lower triangular blocks of 8 x 8 on the
/// diagonal of rows `first` to first + 31. By substitution, each lane a column: beside products
/// of warpgroups each of a warp's own waits for its turn at the tensor cores.
WYVERN_DEVICE void invert_eights(const Tile<fp16, 64, 64>& x, int first) {
  // Values kept from one inverse to the next would spill.
  const int col = opaque(lane_index() % 8);
  const int block = first + lane_index() / 8 * 8;
  float column[8];
#pragma unroll
  for (int row = 0; row < 8; ++row) {
    column[row] = row == col ? 1.0f : 0.0f;
    if (row == 0) continue;
    const auto m = load<4>(reinterpret_cast<const uint32*>(x.at(block + row, block)));
#pragma unroll
    for (int i = 0; i < row; ++i) {
      const uint32 pair = m.at[i / 2];
      const fp16 element{static_cast<uint16>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16U)};
      column[row] = fused_multiply_add(to_float(element), column[i], column[row]);
    }
  }
  sync_warp();
#pragma unroll
  for (int row = 0; row < 8; ++row) *x.at(block + row, block + col) = from_float<fp16>(column[row]);
  sync_warp();
}

/// (I - M)^-1 of two strictly lower triangular 16 x 16 blocks whose diagonal's blocks of 8 x 8 are
/// inverted already. Step by step for both, so that their latencies overlap.
WYVERN_DEVICE void join_8(BlockSum (&x)[2], const Block (&m)[2]) {
  cuda::Accumulator corner[2];
#pragma unroll
  for (int b = 0; b < 2; ++b)
    mma_m16n8k16<fp16>(corner[b].x, {0, m[b].r[1], 0, 0}, transpose_8x8(m[b].r[0]), 0);
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32 pair = m[b].r[3 * half];
        const fp16 element{static_cast<uint16>(j == 0 ? pair & 0xFFFFU : pair >> 16U)};
        x[b].x[half].x[2 * half + j] = to_float(element);
      }
#pragma unroll
  for (int b = 0; b < 2; ++b)
    mma_m16n8k16<fp16>(x[b].x[0].x, {m[b].r[0], 0, 0, m[b].r[3]}, 0,
                       transpose_8x8(pack<fp16>(corner[b].x[2], corner[b].x[3])));
}

/// An inverse by three warps, one chunk's after another's: two of them merge blocks of 8 x 8 up to
/// 32 x 32, rows `first` to first + 31 each, and the third joins those. `x` holds -A on and below
/// the diagonal's blocks of 16 x 16 and is overwritten with the inverse but for the last corner.
/// Each writes its part of (I + A)^-1 - I, rounded to T, to the blocks of `to` on and below the
/// diagonal; begin() returns when that may be written.
template <class T, class Begin>
WYVERN_DEVICE void invert_32(const Tile<fp16, 64, 64>& x, const SwizzledTile<T, 64, 64>& to,
                             int first, Begin&& begin) {
  invert_eights(x, first);
  const Block m[2] = {load_a(x, first, first), load_a(x, first + 16, first + 16)};
  const Block below = load_a(x, first + 16, first);
  BlockSum diagonal[2];
  join_8(diagonal, m);
  const Block own[2] = {rounded(diagonal[0]), rounded(diagonal[1])};
  BlockSum z;
  BlockSum joined;
  multiply<Precision::ieee>(z.x[0], z.x[1], below, right_operand(own[0]));
  share_block(own[0], x, first, first);
  share_block(own[1], x, first + 16, first + 16);
  multiply<Precision::ieee>(joined.x[0], joined.x[1], own[1], right_operand(rounded(z)));
  share_block(rounded(joined), x, first + 16, first);
  begin();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    subtract_identity(diagonal[i]);
    store_block(diagonal[i], to, first + 16 * i, first + 16 * i);
  }
  store_block(joined, to, first + 16, first);
}

/// The third warp's part: rows 32 to 63 of columns 0 to 31.
template <class T, class Begin>
WYVERN_DEVICE void join_32(const Tile<fp16, 64, 64>& x, const SwizzledTile<T, 64, 64>& to,
                           Begin&& begin) {
  // Addresses kept from one inverse to the next would take registers that there are not.
  const int half = opaque(32);
  // Loads first, then products, and those of rows 32 to 47 beside those of the rows below.
  cuda::FragmentB<fp16> product[2][2];
  {
    const Block a[2][2] = {{load_a(x, half, 0), load_a(x, half, 16)},
                           {load_a(x, half + 16, 0), load_a(x, half + 16, 16)}};
    const cuda::FragmentB<fp16> start[2] = {load_b(x, 0, 0), load_b(x, 16, 0)};
    BlockSum z[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        multiply<Precision::ieee>(z[i].x[0], z[i].x[1], a[i][j], start[j]);
#pragma unroll
    for (int i = 0; i < 2; ++i) product[0][i] = right_operand(rounded(z[i]));
    const cuda::FragmentB<fp16> last = load_b(x, 16, 16);
    BlockSum z_last[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      multiply<Precision::ieee>(z_last[i].x[0], z_last[i].x[1], a[i][1], last);
#pragma unroll
    for (int i = 0; i < 2; ++i) product[1][i] = right_operand(rounded(z_last[i]));
  }
  const Block inverse[2] = {load_a(x, half, half), load_a(x, half + 16, half + 16)};
  const Block between = load_a(x, half + 16, half);
  begin();
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    BlockSum result[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      multiply<Precision::ieee>(result[i].x[0], result[i].x[1], inverse[i], product[j][i]);
    multiply<Precision::ieee>(result[1].x[0], result[1].x[1], between, product[j][0]);
#pragma unroll
    for (int i = 0; i < 2; ++i) store_block(result[i], to, half + 16 * i, 16 * j);
  }
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

  /// Reads a warp's rows of A; `diagonal` is 0 on and above the diagonal.
  WYVERN_DEVICE void take(const BlockSum (&of_left)[3], const BlockSum& diagonal) {
#pragma unroll
    for (int b = 0; b < 3; ++b) left[b] = negated(of_left[b]);
    own = negated(diagonal);
  }

  /// Writes (I + A)^-1 - I, rounded to its type, to the blocks of `to`, a SwizzledTile or one with
  /// ScaledColumns, on and below the diagonal.
  template <class To>
  WYVERN_DEVICE void invert(const To& to, int warp) {
    BlockSum diagonal = invert_16(own);
    own = rounded(diagonal);
    share_block(own, x, 16 * warp, 16 * warp);
    if (warp % 2 == 0) arrive_named(name + warp / 2, 64);
    subtract_identity(diagonal);
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
  /// Rows of an odd warp, columns of the warp before.
  template <class To>
  WYVERN_DEVICE void join_16(const To& to, int warp) {
    const int first = 16 * (warp - 1);
    Block a;
#pragma unroll
    for (int i = 0; i < 4; ++i) a.r[i] = warp == 1 ? left[0].r[i] : left[2].r[i];
    BlockSum z, sum;
    multiply<Precision::ieee>(z.x[0], z.x[1], a, load_b(x, first, first));
    multiply<Precision::ieee>(sum.x[0], sum.x[1], own, right_operand(rounded(z)));
    before = rounded(sum);
    share_block(before, x, first + 16, first);
    store_block(sum, to, first + 16, first);
  }

  /// Rows of warps 2 and 3, columns 0 to 31.
  template <class To>
  WYVERN_DEVICE void join_32(const To& to, int warp) {
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
