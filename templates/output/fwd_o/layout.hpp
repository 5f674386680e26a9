// What a block of fwd_o keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::fwd_o {

/// One of the buffers that tiles of BK columns of q and k, and BK rows of the state, pass through.
template <class S>
struct BufferLayout {
  cuda::TilePlace q, k, h;
  int bytes;

  constexpr explicit BufferLayout(const S& s) {
    cuda::LayoutBuilder at;
    q = at.tile(s.BT, s.BK, s.DTYPE);
    k = at.tile(s.BT, s.BK, s.DTYPE);
    h = at.tile(s.BK, s.BV, s.DTYPE);
    bytes = at.bytes;
  }
};

/// The buffers, from the start on; V'; the summed gate and the scales of the chunk's rows.
template <class S>
struct SharedLayout {
  cuda::TilePlace values;
  cuda::ArrayPlace G, q_rstd, k_rstd;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    at.take(s.num_stages * BufferLayout<S>(s).bytes);
    values = at.tile(s.BT, s.BV, s.DTYPE);
    G = at.array(s.BT);
    if (s.QK_L2NORM) {
      q_rstd = at.array(s.BT);
      k_rstd = at.array(s.BT);
    }
    bytes = at.bytes;
  }
};

}  // namespace wyvern::fwd_o
