// The places in shared memory of what blocks of kda keep there: parts of their templates' layouts.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::cuda::kda {

/// Columns of a tile that holds all `cols` columns of a dimension.
constexpr long long padded(long long cols) { return (cols + 15) / 16 * 16; }

/// A KeyTile: queries and keys in their own type, gates in fp32; with ERASE_WRITE the erase gate.
struct KeyPlace {
  TilePlace q, k, G, erase;
};
template <class S>
constexpr KeyPlace take_keys(LayoutBuilder& at, const S& s, long long cols) {
  KeyPlace keys;
  keys.q = at.tile(s.BT, cols, s.DTYPE);
  keys.k = at.tile(s.BT, cols, s.DTYPE);
  keys.G = at.tile(s.BT, cols, DType::fp32);
  if (s.ERASE_WRITE) keys.erase = at.tile(s.BT, cols, s.BETA_DTYPE);
  return keys;
}

/// Columns of values; with ERASE_WRITE of their write gate too.
struct ValuePlace {
  TilePlace v, write;
};
template <class S>
constexpr ValuePlace take_values(LayoutBuilder& at, const S& s) {
  ValuePlace values;
  values.v = at.tile(s.BT, s.BV, s.DTYPE);
  if (s.ERASE_WRITE) values.write = at.tile(s.BT, s.BV, s.BETA_DTYPE);
  return values;
}

/// RowFactors; the scales of queries and keys only where `scaled`.
struct RowPlace {
  ArrayPlace beta, q_rstd, k_rstd;
};
constexpr RowPlace take_rows(LayoutBuilder& at, long long rows, bool scaled) {
  RowPlace place;
  place.beta = at.array(rows);
  if (scaled) {
    place.q_rstd = at.array(rows);
    place.k_rstd = at.array(rows);
  }
  return place;
}

/// Floats by which the `split` warps of each strip add their parts of Aqk and A (join_shares).
constexpr long long share_floats(long long rows, long long split) {
  return (split - 1) * (rows / 16) * (rows / 8) * 2 * 128;
}

/// What 16-bit products of the way back inside a chunk are made of: bf16, as neither the decays
/// around a middle row nor gradients keep to fp16's range.
constexpr DType operand_of(DType type) { return size_of(type) == 2 ? DType::bf16 : type; }

/// One of the buffers that tiles of BK columns of q, k and Gk, and BK rows of the states, pass
/// through on the way back.
template <class S>
struct StateBufferLayout {
  TilePlace h, dh;
  KeyPlace keys;
  int bytes;

  constexpr explicit StateBufferLayout(const S& s) {
    LayoutBuilder at;
    h = at.tile(s.BK, padded(s.V), s.DTYPE);
    dh = at.tile(s.BK, padded(s.V), s.DTYPE);
    keys = take_keys(at, s, s.BK);
    bytes = at.bytes;
  }
};

/// What a block of StateBackward keeps: the buffers, and in their place, before the first is
/// filled, the inverse; then what stays.
template <class S>
struct StateBackwardLayout {
  TilePlace Tinv, dO, values, X;
  RowPlace rows;
  ArrayPlace row_sums;     ///< BT for each warp; of rates of one a row
  ArrayPlace end;          ///< BK
  ArrayPlace column_sums;  ///< BK for each strip
  int bytes;

  constexpr explicit StateBackwardLayout(const S& s) {
    LayoutBuilder before, at;
    Tinv = before.tile(s.BT, s.BT, s.DTYPE);
    at.take(s.num_stages * StateBufferLayout<S>(s).bytes);
    at.cover(before);
    dO = at.tile(s.BT, padded(s.V), s.DTYPE);
    values = at.tile(s.BT, padded(s.V), s.DTYPE);
    X = at.tile(s.BT, padded(s.V), s.DTYPE);
    rows = take_rows(at, s.BT, s.QK_L2NORM);
    row_sums = at.array(s.ERASE_WRITE ? 0 : s.num_warps * s.BT);
    end = at.array(s.BK);
    column_sums = at.array(s.BT / 16 * s.BK);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::cuda::kda
