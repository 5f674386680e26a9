// What a block of gdn2_intra_solve_wu keeps in shared memory.
#pragma once

#include "device/cuda/gdn2_layout.hpp"

namespace wyvern::gdn2_intra_solve_wu {

/// q, k, Gk and erase of the chunk and factors of its rows; A, later its inverse, and BV columns of
/// v and write, or in their place what warps join their shares of A in.
template <class S>
struct SharedLayout {
  cuda::gdn2::KeyPlace keys;
  cuda::kda::RowPlace rows;
  cuda::ArrayPlace shares;
  cuda::TilePlace A;
  cuda::gdn2::ValuePlace values;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    keys = cuda::gdn2::take_keys(at, s.BT, cuda::kda::padded(s.K), s.DTYPE, s.BETA_DTYPE);
    rows = cuda::kda::take_rows(at, s.BT, s.QK_L2NORM);
    cuda::LayoutBuilder joined = at;
    shares = joined.array(cuda::kda::share_floats(s.BT, s.num_warps / (s.BT / 16)));
    A = at.tile(s.BT, s.BT, DType::fp32);
    values = cuda::gdn2::take_values(at, s.BT, s.BV, s.DTYPE, s.BETA_DTYPE);
    at.cover(joined);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::gdn2_intra_solve_wu
