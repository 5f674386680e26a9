// What a block of bwd_dv_local keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::bwd_dv_local {

/// One of the buffers that tiles of BK columns of q and k pass through.
template <class S>
struct BufferLayout {
  cuda::TilePlace q, k;
  int bytes;

  constexpr explicit BufferLayout(const S& s) {
    cuda::LayoutBuilder at;
    q = at.tile(s.BT, s.BK, s.DTYPE);
    k = at.tile(s.BT, s.BK, s.DTYPE);
    bytes = at.bytes;
  }
};

/// The buffers, from the start on; BV columns of dO; the summed gate and the scales of the chunk's
/// rows.
template <class S>
struct SharedLayout {
  cuda::TilePlace gradients;
  cuda::ArrayPlace G, q_rstd, k_rstd;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    at.take(s.num_stages * BufferLayout<S>(s).bytes);
    gradients = at.tile(s.BT, s.BV, s.DTYPE);
    G = at.array(s.BT);
    if (s.QK_L2NORM) {
      q_rstd = at.array(s.BT);
      k_rstd = at.array(s.BT);
    }
    bytes = at.bytes;
  }
};

}  // namespace wyvern::bwd_dv_local
