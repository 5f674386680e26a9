// What a block of scaled_dot_kkt keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::scaled_dot_kkt {

/// num_stages buffers that tiles of BK columns of the keys pass through; per row of the chunk the
/// summed gate, beta and the scale of the key.
template <class S>
struct SharedLayout {
  cuda::TilePlace keys;  // of the first buffer
  cuda::ArrayPlace G, beta, k_rstd;
  int buffer_bytes;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    keys = at.tile(s.BT, s.BK, s.DTYPE);
    buffer_bytes = at.bytes;
    at.take((s.num_stages - 1) * buffer_bytes);
    G = at.array(s.BT);
    beta = at.array(s.BT);
    if (s.QK_L2NORM) k_rstd = at.array(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::scaled_dot_kkt
