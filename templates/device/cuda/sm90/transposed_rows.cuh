// Rows of a chunk by 64 columns of V that a warpgroup has transposed: the columns are the rows of
// its accumulators, and the chunk's rows their columns.
#pragma once

#include "device/cuda/sm90/product.cuh"

namespace wyvern::cuda::sm90 {

/// This lane's row of four 8 x 8 matrices of a tile of a chunk's rows by columns of V: this warp's
/// 16 columns of rows 8 j to 8 j + 7, then of the next eight rows.
template <class TileType>
WYVERN_DEVICE typename TileType::Element* matrices_at(const TileType& tile, int j) {
  const int lane = lane_index();
  return tile.at(8 * j + lane / 16 * 8 + lane % 8, warp_index() % 4 * 16 + lane / 8 % 2 * 8);
}

template <class T>
WYVERN_DEVICE float low_half(uint32 pair) {
  return to_float(T{static_cast<uint16>(pair & 0xFFFFU)});
}
template <class T>
WYVERN_DEVICE float high_half(uint32 pair) {
  return to_float(T{static_cast<uint16>(pair >> 16U)});
}

/// Rows of a tile, transposed, as a left operand; and back.
template <class T>
WYVERN_DEVICE void load_transposed(FragmentA<T, 64>& a, const SwizzledTile<T, 64, 64>& tile) {
#pragma unroll
  for (int j = 0; j < 4; ++j) load_matrix_x4_transposed(a.x[j], matrices_at(tile, 2 * j));
}
template <class T>
WYVERN_DEVICE void store_transposed(const SwizzledTile<T, 64, 64>& tile,
                                    const FragmentA<T, 64>& a) {
#pragma unroll
  for (int j = 0; j < 4; ++j) store_matrix_x4_transposed(matrices_at(tile, 2 * j), a.x[j]);
}

}  // namespace wyvern::cuda::sm90
