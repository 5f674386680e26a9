// What a block of transpose_states keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::transpose_states {

/// Rows and columns of a block.
inline constexpr int kSquare = 64;

template <class S>
struct SharedLayout {
  cuda::TilePlace square;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    square = at.tile(kSquare, kSquare, s.DTYPE);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::transpose_states
