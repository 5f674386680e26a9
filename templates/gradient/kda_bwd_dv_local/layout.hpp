// What a block of kda_bwd_dv_local keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::kda_bwd_dv_local {

/// Aqk of the chunk and BV columns of dO.
template <class S>
struct SharedLayout {
  cuda::TilePlace scores, gradients;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    scores = at.tile(s.BT, s.BT, DType::fp32);
    gradients = at.tile(s.BT, s.BV, s.DTYPE);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_bwd_dv_local
