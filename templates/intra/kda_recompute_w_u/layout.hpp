// What a block of kda_recompute_w_u keeps in shared memory.
#pragma once

#include "device/cuda/kda_layout.hpp"

namespace wyvern::kda_recompute_w_u {

/// The inverse and factors of rows; a tile of q, k and Gk, or in its place one of v.
template <class S>
struct SharedLayout {
  cuda::TilePlace inverse;
  cuda::kda::RowPlace rows;
  cuda::kda::KeyPlace keys;
  cuda::kda::ValuePlace values;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    inverse = at.tile(s.BT, s.BT, s.DTYPE);
    rows = cuda::kda::take_rows(at, s.BT, s.QK_L2NORM);
    cuda::LayoutBuilder of_u = at;
    keys = cuda::kda::take_keys(at, s, s.BK);
    values = cuda::kda::take_values(of_u, s);
    at.cover(of_u);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_recompute_w_u
