// What a block of kkt_solve_wu keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::kkt_solve_wu {

/// Keys, a tile of values, A and then its inverse; per row of the chunk the summed gate, beta, the
/// factor of W and the scale of the key.
template <class S>
struct SharedLayout {
  cuda::TilePlace keys, values, x;
  cuda::ArrayPlace G, beta, scale_w, k_rstd;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    keys = at.tile(s.BT, cuda::padded(s.K), s.DTYPE);
    values = at.tile(s.BT, s.BV, s.DTYPE);
    x = at.tile(s.BT, s.BT, DType::fp32);
    G = at.array(s.BT);
    beta = at.array(s.BT);
    scale_w = at.array(s.BT);
    if (s.QK_L2NORM) k_rstd = at.array(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kkt_solve_wu
