// How a block covers rows of columns, and the shared memory that its sums pass through.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::cuda {

/// How `threads` threads cover `size` rows of `columns`; vectors divide `unit`, a divisor of
/// `columns`.
struct ColumnSplit {
  int vector;        ///< neighbouring columns of a thread
  int lanes = 1;     ///< threads along the columns, a power of two
  int groups = 1;    ///< of as many columns as a block has
  int segments = 1;  ///< of rows
  int rows = 1;      ///< of a segment: of a thread

  constexpr ColumnSplit(long long threads, long long size, long long columns, long long unit)
      : vector(unit % 4 == 0   ? 4
               : unit % 2 == 0 ? 2
                               : 1) {
    while (lanes < (columns + vector - 1) / vector && lanes < 32) lanes *= 2;
    groups = static_cast<int>((columns + lanes * vector - 1) / (lanes * vector));
    segments = static_cast<int>(threads / lanes < size ? threads / lanes : size);
    rows = static_cast<int>(size / segments);
  }
};

/// A vector of each of `threads` threads.
struct ColumnSumsLayout {
  ArrayPlace sums;
  int bytes;

  constexpr ColumnSumsLayout(long long threads, const ColumnSplit& split) {
    LayoutBuilder at;
    sums = at.array(threads * split.vector);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::cuda
