// What a block of gdn2_intra keeps in shared memory.
#pragma once

#include "device/cuda/gdn2_layout.hpp"

namespace wyvern::gdn2_intra {

/// One of the buffers that tiles of BK columns of q, k, Gk and erase pass through.
template <class S>
struct BufferLayout {
  cuda::gdn2::KeyPlace keys;
  int bytes;

  constexpr explicit BufferLayout(const S& s) {
    cuda::LayoutBuilder at;
    keys = cuda::gdn2::take_keys(at, s.BT, s.BK, s.DTYPE, s.BETA_DTYPE);
    bytes = at.bytes;
  }
};

/// The buffers, and in their place at the end what warps join their shares in; factors of rows.
template <class S>
struct SharedLayout {
  cuda::ArrayPlace shares;
  cuda::kda::RowPlace rows;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder joined, at;
    shares = joined.array(cuda::kda::share_floats(s.BT, s.num_warps / (s.BT / 16)));
    at.take(s.num_stages * BufferLayout<S>(s).bytes);
    at.cover(joined);
    rows = cuda::kda::take_rows(at, s.BT, s.QK_L2NORM);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::gdn2_intra
