// What a block of solve_tril keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::solve_tril {

/// A, and then its inverse.
template <class S>
struct SharedLayout {
  cuda::TilePlace x;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    x = at.tile(s.BT, s.BT, DType::fp32);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::solve_tril
