// Tiles in shared memory as tensor copies write them and wgmma reads them.
#pragma once

#include "device/cuda/sm90/layout.hpp"
#include "device/cuda/sm90/ptx.cuh"
#include "device/cuda/tile.cuh"

namespace wyvern::cuda::sm90 {

/// Rows x Cols elements of 16 bits in panels of 64 columns, one after another. A panel's row has
/// 128 bytes, whose eight pieces of 16 bytes are permuted: piece p of row r is at p ^ (r % 8), so
/// that the same columns of eight rows are in different banks. A tensor copy with 128-byte swizzle
/// writes one by a box of 64 columns, Rows rows and Cols / 64 panels.
template <class T, int Rows, int Cols>
struct SwizzledTile {
  static_assert(sizeof(T) == 2 && Rows % 8 == 0 && Cols % 64 == 0);
  using Element = T;
  static constexpr int kRows = Rows;
  static constexpr int kCols = Cols;
  static constexpr int kPanelBytes = Rows * 128;
  static constexpr int kBytes = Cols / 64 * kPanelBytes;
  static constexpr int kAlignment = kSwizzleAlignment;

  unsigned char* data;  ///< aligned to kAlignment

  /// Element (row, col); up to col | 7 its neighbours follow it.
  WYVERN_DEVICE T* at(int row, int col) const {
    const int piece = (col % 64 / 8) ^ (row % 8);
    T* const element =
        reinterpret_cast<T*>(data + col / 64 * kPanelBytes + row * 128 + piece * 16) + col % 8;
    touch(element);
    return element;
  }

  /// An operand whose rows are the tile's, from row `first`, a multiple of 8: A, or B transposed.
  /// Its depth are 16 columns from `depth`, a multiple of 16.
  WYVERN_DEVICE Descriptor by_rows(int first, int depth) const {
    return describe(depth / 64 * kPanelBytes + first * 128 + depth % 64 * 2, 16);
  }
  /// An operand whose rows are the tile's columns, from column `first`, a multiple of 64 or
  /// together with the rest of the operand inside one panel. Its depth are 16 rows of the tile from
  /// `depth`, a multiple of 8.
  WYVERN_DEVICE Descriptor by_columns(int first, int depth) const {
    return describe(first / 64 * kPanelBytes + depth * 128 + first % 64 * 2, kPanelBytes);
  }

 private:
  /// Start, the stride from one panel to the next, 1024 bytes from eight rows to the next eight,
  /// all in units of 16 bytes; 1 for the 128-byte swizzle. The start's offset is added last, so
  /// that one addition leads from an operand's 16 columns to the next.
  WYVERN_DEVICE Descriptor describe(int offset, int panel_stride) const {
    constexpr uint32 kHigh = 1024 / 16 | 1U << 30U;
    const uint32 tile = shared_address(data) >> 4U | static_cast<uint32>(panel_stride / 16) << 16U;
    return {uint64{tile + static_cast<uint32>(offset / 16)} | uint64{kHigh} << 32U};
  }
};

/// The tile that a layout which starts at `start` has in Place.
template <SwizzledPlace Place>
WYVERN_DEVICE SwizzledTile<Element<Place.type>, Place.rows, Place.cols> swizzled_at(
    unsigned char* start) {
  return {start + Place.offset};
}

/// Clears rows `first` to `end` - 1 of a tile, by a warp, a warpgroup or a block of Threads
/// threads: past a sequence's end the rows of a tensor belong to the next sequence.
template <int Threads = 32, class TileType>
WYVERN_DEVICE void clear_rows(const TileType& tile, int first, int end = TileType::kRows) {
  constexpr int kPieces = TileType::kCols / 8;
  const int thread = Threads > 128 ? thread_index() : thread_index() % Threads;
  for (int i = Threads == 32 ? lane_index() : thread; i < (end - first) * kPieces; i += Threads)
    *reinterpret_cast<Vector<uint32, 4>*>(tile.at(first + i / kPieces, i % kPieces * 8)) = {};
}

}  // namespace wyvern::cuda::sm90
