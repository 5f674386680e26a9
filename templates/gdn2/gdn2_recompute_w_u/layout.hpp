// What a block of gdn2_recompute_w_u keeps in shared memory.
#pragma once

#include "device/cuda/gdn2_layout.hpp"

namespace wyvern::gdn2_recompute_w_u {

/// The inverse and factors of rows; a tile of q, k, Gk and erase, or in its place one of v and
/// write.
template <class S>
struct SharedLayout {
  cuda::TilePlace inverse;
  cuda::kda::RowPlace rows;
  cuda::gdn2::KeyPlace keys;
  cuda::gdn2::ValuePlace values;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    inverse = at.tile(s.BT, s.BT, s.DTYPE);
    rows = cuda::kda::take_rows(at, s.BT, s.QK_L2NORM);
    cuda::LayoutBuilder of_u = at;
    keys = cuda::gdn2::take_keys(at, s.BT, s.BK, s.DTYPE, s.BETA_DTYPE);
    values = cuda::gdn2::take_values(of_u, s.BT, s.BV, s.DTYPE, s.BETA_DTYPE);
    at.cover(of_u);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::gdn2_recompute_w_u
