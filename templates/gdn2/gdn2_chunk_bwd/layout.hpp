// What a block of gdn2_chunk_bwd keeps in shared memory.
#pragma once

#include "device/cuda/gdn2_layout.hpp"

namespace wyvern::gdn2_chunk_bwd {

/// One of the buffers that K tiles pass through: of the entering state, of the gradient of the
/// leaving one, of q, k, Gk and erase.
template <class S>
struct BufferLayout {
  cuda::TilePlace h, dh;
  cuda::gdn2::KeyPlace keys;
  int bytes;

  constexpr explicit BufferLayout(const S& s) {
    cuda::LayoutBuilder at;
    h = at.tile(s.BK, cuda::kda::padded(s.V), s.DTYPE);
    dh = at.tile(s.BK, cuda::kda::padded(s.V), s.DTYPE);
    keys = cuda::gdn2::take_keys(at, s.BT, s.BK, s.DTYPE, s.BETA_DTYPE);
    bytes = at.bytes;
  }
};

/// The buffers, in whose place the inverse lies before the first K tile arrives; dO, V' and X;
/// factors of rows; the chunk-end term of a K tile's columns, and the strips' parts of it; dAqk and
/// dA, and dAqk's diagonal.
template <class S>
struct SharedLayout {
  cuda::TilePlace inverse;
  cuda::TilePlace dO, values, X;
  cuda::kda::RowPlace rows;
  cuda::ArrayPlace end, column_sums;
  cuda::TilePlace dAqk, dA;
  cuda::ArrayPlace diagonal;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder first, at;
    inverse = first.tile(s.BT, s.BT, s.DTYPE);
    at.take(s.num_stages * BufferLayout<S>(s).bytes);
    at.cover(first);
    dO = at.tile(s.BT, cuda::kda::padded(s.V), s.DTYPE);
    values = at.tile(s.BT, cuda::kda::padded(s.V), s.DTYPE);
    X = at.tile(s.BT, cuda::kda::padded(s.V), s.DTYPE);
    rows = cuda::kda::take_rows(at, s.BT, s.QK_L2NORM);
    end = at.array(s.BK);
    column_sums = at.array(s.BT / 16 * s.BK);
    dAqk = at.tile(s.BT, s.BT, cuda::kda::operand_of(s.DTYPE));
    dA = at.tile(s.BT, s.BT, cuda::kda::operand_of(s.DTYPE));
    diagonal = at.array(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::gdn2_chunk_bwd
