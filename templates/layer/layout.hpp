// Shared memory of blocks of the layer's templates.
#pragma once

#include "device/cuda/layout.hpp"
#include "device/extents.hpp"

namespace wyvern::output_norm_bwd {

/// The longest rows that the lanes of a warp have in registers; longer ones are read twice.
constexpr int kMostHeld = 512;

/// Each warp's part of the weight's gradient, or of longer rows what all columns of them need.
template <class S>
struct SharedLayout {
  cuda::ArrayPlace weight, rstd, along;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    if (s.V <= kMostHeld) {
      weight = at.array(s.num_warps * s.V);
    } else {
      rstd = at.array(kNormPartRows);
      along = at.array(kNormPartRows);
    }
    bytes = at.bytes;
  }
};

}  // namespace wyvern::output_norm_bwd
