// How block functions lay out their scratch memory. Shared with the contracts, which ask for it.
#pragma once

namespace wyvern::scratch {

/// Floats between the rows of a tile: whole cache lines of 16 floats, and an odd number of them, so
/// that the rows of a panel fall into different sets of the cache.
constexpr long row_stride(long columns) { return ((columns + 15) / 16 * 16) | 16; }

/// Floats of a tile, rows padded to whole 8.
constexpr long tile(long rows, long columns) { return (rows + 7) / 8 * 8 * row_stride(columns); }

/// Floats of a vector, padded to whole cache lines.
constexpr long vector(long count) { return (count + 15) / 16 * 16; }

}  // namespace wyvern::scratch
