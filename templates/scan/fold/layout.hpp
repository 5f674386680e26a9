// What a block of fold keeps in shared memory, and how its threads divide the state.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::fold {

/// Columns of M that are in shared memory at a time; with BACKWARDS rows.
inline constexpr int kDepth = 32;
/// Neighbouring columns of the state that a thread has.
inline constexpr int kColumns = 4;

template <class S>
struct SharedLayout {
  int row_threads;  ///< threads side by side along the state's rows
  int rows;         ///< of the state that a thread has, row_threads apart
  int stride;       ///< floats between columns of M; odd, so that no two lanes use one bank
  int depth;        ///< rows of the state in shared memory, those past K zeros
  cuda::ArrayPlace M, state;
  int bytes;

  constexpr explicit SharedLayout(const S& s)
      : row_threads(static_cast<int>(s.num_warps * 32 * kColumns / s.BV)),
        rows(static_cast<int>((s.K + row_threads - 1) / row_threads)),
        stride(rows * row_threads + 1),
        depth(static_cast<int>((s.K + kDepth - 1) / kDepth * kDepth)) {
    cuda::LayoutBuilder at;
    if (s.TRANSITION) M = at.array(static_cast<long long>(kDepth) * stride);
    if (s.TRANSITION) state = at.array(depth * s.BV);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::fold
