// What a block of kda_fwd_o keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::kda_fwd_o {

/// One of the buffers that tiles of BK columns of qg, and BK rows of the state, pass through.
template <class S>
struct BufferLayout {
  cuda::TilePlace q, h;
  int bytes;

  constexpr explicit BufferLayout(const S& s) {
    cuda::LayoutBuilder at;
    q = at.tile(s.BT, s.BK, s.DTYPE);
    h = at.tile(s.BK, s.BV, s.DTYPE);
    bytes = at.bytes;
  }
};

/// The buffers, from the start on, and V'.
template <class S>
struct SharedLayout {
  cuda::TilePlace values;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    at.take(s.num_stages * BufferLayout<S>(s).bytes);
    values = at.tile(s.BT, s.BV, s.DTYPE);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_fwd_o
