// Rows of tokens that may be strided.
#pragma once

#include "device/cuda/tile.cuh"
#include "device/token_rows.hpp"

namespace wyvern::cuda {

/// load_tile of such rows.
template <int Threads, int Align, class T, int Rows, int Cols>
WYVERN_DEVICE void load_tile(const Tile<T, Rows, Cols>& tile, const TokenRows<const T>& source,
                             int rows, int cols) {
  load_tile<Threads, Align>(tile, source.first, source.stride, rows, cols);
}

/// Zeros in the first `columns` elements of so many rows: the output of a null sequence. By all
/// Threads threads.
template <int Threads, class T>
WYVERN_DEVICE void clear_output(const TokenRows<T>& to, int rows, int columns) {
  for (int64 i = thread_index(); i < int64{rows} * columns; i += Threads)
    to.row(i / columns)[i % columns] = from_float<T>(0.0f);
}

}  // namespace wyvern::cuda
