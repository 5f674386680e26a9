// What a block of kda_intra_bwd keeps in shared memory.
#pragma once

#include "device/cuda/kda_layout.hpp"

namespace wyvern::kda_intra_bwd {

/// dAqk and dA, a tile of q, k and Gk, dAqk's diagonal, sums of rows (BT for each warp of a strip)
/// and factors of rows.
template <class S>
struct SharedLayout {
  cuda::TilePlace dAqk, dA;
  cuda::kda::KeyPlace keys;
  cuda::ArrayPlace diagonal, row_sums;
  cuda::kda::RowPlace rows;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    dAqk = at.tile(s.BT, s.BT, cuda::kda::operand_of(s.DTYPE));
    dA = at.tile(s.BT, s.BT, cuda::kda::operand_of(s.DTYPE));
    keys = cuda::kda::take_keys(at, s, s.BK);
    diagonal = at.array(s.BT);
    row_sums = at.array(s.ERASE_WRITE ? 0 : s.num_warps * 16 / s.BT * s.BT);
    rows = cuda::kda::take_rows(at, s.BT, s.QK_L2NORM);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_intra_bwd
