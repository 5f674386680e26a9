// A block's scratch memory, described once: the host compiles a layout for the bytes of a launch,
// the kernel for the places of its tiles and vectors (tile_at, vector_at of tile.hpp).
//
//     template <class S>
//     struct ScratchLayout {
//       cpu::TilePlace queries;
//       cpu::VectorPlace gate;
//       long bytes;
//       constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
//         queries = at.tile(s.BT, s.K);
//         gate = at.vector(s.BT);
//         bytes = at.bytes;
//       }
//     };
//
// S is the host's Spec, whose values are known at run time, or the kernel's, whose values are
// constants. A layout starts where `at` says, so that one can be part of another
// (LayoutBuilder::part).
#pragma once

namespace wyvern::cpu {

/// Floats between the rows of a tile: whole cache lines of 16 floats, and an odd number of them, so
/// that the rows of a panel fall into different sets of the cache.
constexpr long row_stride(long columns) { return ((columns + 15) / 16 * 16) | 16; }

/// A tile of fp32 with `cols` columns, `offset` floats from the start of the block's scratch.
struct TilePlace {
  long offset = 0;
  int cols = 0;
};

/// fp32 values one after another, `offset` floats from the start of the block's scratch.
struct VectorPlace {
  long offset = 0;
};

/// Allocates scratch from its start on, in whole cache lines.
struct LayoutBuilder {
  long bytes = 0;  ///< allocated so far

  /// A tile with its rows padded to whole 8, as products on any processor need them.
  constexpr TilePlace tile(long rows, long cols) {
    return {take((rows + 7) / 8 * 8 * row_stride(cols)), static_cast<int>(cols)};
  }
  constexpr VectorPlace vector(long count) { return {take((count + 15) / 16 * 16)}; }
  /// A layout that begins here.
  template <class Part, class... Sizes>
  constexpr Part part(const Sizes&... sizes) {
    const Part result(sizes..., *this);
    bytes = result.bytes;
    return result;
  }
  /// Extends to the end of another builder that began as a copy of this one, so that both use the
  /// same memory.
  constexpr void cover(const LayoutBuilder& other) {
    if (other.bytes > bytes) bytes = other.bytes;
  }

 private:
  static constexpr long kFloat = 4;  // bytes

  constexpr long take(long floats) {
    const long offset = bytes / kFloat;
    bytes += floats * kFloat;
    return offset;
  }
};

}  // namespace wyvern::cpu
