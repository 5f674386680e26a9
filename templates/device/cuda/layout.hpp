// What a block keeps in shared memory, described once: the host compiles a layout for the bytes of
// a launch, the kernel for the places and types of its tiles (tile_at, array_at of tile.cuh).
//
//     template <class S>
//     struct SharedLayout {
//       TilePlace q, k;
//       ArrayPlace G;
//       int bytes;
//       constexpr explicit SharedLayout(const S& s) {
//         LayoutBuilder at;
//         q = at.tile(s.BT, s.BK, s.DTYPE);
//         k = at.tile(s.BT, s.BK, s.DTYPE);
//         G = at.array(s.BT);
//         bytes = at.bytes;
//       }
//     };
//
// S is the host's Spec, whose values are known at run time, or the kernel's, whose values are
// constants.
#pragma once

#include "include/wyvern/element.hpp"

namespace wyvern::cuda {

/// The least multiple of 16 that is not below `size`: a dimension as products of tiles see it.
constexpr int padded(long long size) { return static_cast<int>((size + 15) / 16 * 16); }

/// Elements from one row of a tile to the next. Eight elements of padding keep fragment loads free
/// of bank conflicts: 16-byte rows of ldmatrix for 16-bit types, pairs of floats for fp32.
constexpr int tile_stride(long long cols) { return padded(cols) + 8; }

/// A row-major tile, `offset` bytes from the layout's start.
struct TilePlace {
  int offset = 0;
  int rows = 0;
  int cols = 0;
  DType type = DType::fp32;
};

/// `count` elements one after another, `offset` bytes from the layout's start.
struct ArrayPlace {
  int offset = 0;
  int count = 0;
  DType type = DType::fp32;
};

/// Hands out memory from a layout's start on, in multiples of 16 bytes.
struct LayoutBuilder {
  int bytes = 0;  ///< handed out so far

  /// The offset of `count` bytes.
  constexpr int take(long long count) {
    const int offset = bytes;
    bytes += static_cast<int>((count + 15) / 16 * 16);
    return offset;
  }
  constexpr TilePlace tile(long long rows, long long cols, DType type) {
    const auto size = static_cast<long long>(size_of(type));
    return {take(rows * tile_stride(cols) * size), static_cast<int>(rows), static_cast<int>(cols),
            type};
  }
  constexpr ArrayPlace array(long long count, DType type = DType::fp32) {
    return {take(count * static_cast<long long>(size_of(type))), static_cast<int>(count), type};
  }
  /// Makes room for what another builder, begun as a copy of this one, handed out in the same
  /// place.
  constexpr void cover(const LayoutBuilder& other) {
    if (other.bytes > bytes) bytes = other.bytes;
  }
};

}  // namespace wyvern::cuda
