// The places in shared memory of what blocks of ChunkBackward keep there: parts of the layouts of
// bwd_dqkwg, wy_bwd and wy_dqkg.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::cuda::gradient {

/// Columns of V in a tile that holds all of it.
constexpr long long padded(long long cols) { return (cols + 15) / 16 * 16; }

/// One of the buffers that tiles of BK columns of q and k, and BK rows of the states, pass through.
template <class S>
struct StateBufferLayout {
  TilePlace q, k, h, dh;
  int bytes;

  constexpr explicit StateBufferLayout(const S& s) {
    LayoutBuilder at;
    q = at.tile(s.BT, s.BK, s.DTYPE);
    k = at.tile(s.BT, s.BK, s.DTYPE);
    h = at.tile(s.BK, padded(s.V), s.DTYPE);
    dh = at.tile(s.BK, padded(s.V), s.DTYPE);
    bytes = at.bytes;
  }
};

/// All columns of V, a row for each of the chunk.
template <class S>
constexpr TilePlace take_values(LayoutBuilder& at, const S& s) {
  return at.tile(s.BT, padded(s.V), s.DTYPE);
}
template <class S>
constexpr TilePlace take_square(LayoutBuilder& at, const S& s) {
  return at.tile(s.BT, s.BT, s.DTYPE);
}

/// Columns: only what the operator and its options have.
struct ColumnPlace {
  ArrayPlace G, q_rstd, k_rstd;
};
template <class S>
constexpr ColumnPlace take_columns(LayoutBuilder& at, const S& s) {
  ColumnPlace columns;
  if (s.SCALAR_GATE) columns.G = at.array(s.BT);
  if (s.QK_L2NORM) {
    columns.q_rstd = at.array(s.BT);
    columns.k_rstd = at.array(s.BT);
  }
  return columns;
}

/// RowSums: a number a row for each warp that shares it.
template <class S>
constexpr ArrayPlace take_row_sums(LayoutBuilder& at, const S& s) {
  return at.array(s.num_warps / (s.BT / 16) * s.BT);
}

}  // namespace wyvern::cuda::gradient
