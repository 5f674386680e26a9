// What a block of kda_intra_solve_wu keeps in shared memory.
#pragma once

#include "device/cuda/kda_layout.hpp"

namespace wyvern::kda_intra_solve_wu {

/// q, k and Gk of the chunk and factors of its rows; A, later its inverse, and BV columns of v, or
/// in their place the warps' partial sums of A.
template <class S>
struct SharedLayout {
  cuda::kda::KeyPlace keys;
  cuda::kda::RowPlace rows;
  cuda::ArrayPlace shares;
  cuda::TilePlace A;
  cuda::kda::ValuePlace values;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    keys = cuda::kda::take_keys(at, s, cuda::kda::padded(s.K));
    rows = cuda::kda::take_rows(at, s.BT, s.QK_L2NORM);
    cuda::LayoutBuilder sums = at;
    shares = sums.array(cuda::kda::share_floats(s.BT, s.num_warps / (s.BT / 16)));
    A = at.tile(s.BT, s.BT, DType::fp32);
    values = cuda::kda::take_values(at, s);
    at.cover(sums);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_intra_solve_wu
