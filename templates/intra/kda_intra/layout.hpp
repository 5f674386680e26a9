// What a block of kda_intra keeps in shared memory.
#pragma once

#include "device/cuda/kda_layout.hpp"

namespace wyvern::kda_intra {

/// One of the buffers that tiles of BK columns of a KeyTile pass through.
template <class S>
struct BufferLayout {
  cuda::kda::KeyPlace keys;
  int bytes;

  constexpr explicit BufferLayout(const S& s) {
    cuda::LayoutBuilder at;
    keys = cuda::kda::take_keys(at, s, s.BK);
    bytes = at.bytes;
  }
};

/// The pipeline's buffers, and at the end in their place the warps' partial sums; factors of rows.
template <class S>
struct SharedLayout {
  cuda::ArrayPlace shares;
  cuda::kda::RowPlace rows;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder sums, at;
    shares = sums.array(cuda::kda::share_floats(s.BT, s.num_warps / (s.BT / 16)));
    at.take(s.num_stages * BufferLayout<S>(s).bytes);
    at.cover(sums);
    rows = cuda::kda::take_rows(at, s.BT, s.QK_L2NORM);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_intra
