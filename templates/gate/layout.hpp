// Shared memory of blocks of the gates' templates; of those that work column by column:
// device/cuda/columns_layout.hpp.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::cumsum {

/// A sum of each thread, and its rounding error.
template <class S>
struct SharedLayout {
  cuda::ArrayPlace totals;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    totals = at.array(2 * s.num_warps * 32);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::cumsum
