// The places in shared memory of what blocks of kda keep there: parts of their templates' layouts.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::cuda::kda {

/// Columns of a tile that holds all `cols` columns of a dimension.
constexpr long long padded(long long cols) { return (cols + 15) / 16 * 16; }

/// A KeyTile: queries and keys in their own type, gates in fp32.
struct KeyPlace {
  TilePlace q, k, G;
};
constexpr KeyPlace take_keys(LayoutBuilder& at, long long rows, long long cols, DType type) {
  KeyPlace keys;
  keys.q = at.tile(rows, cols, type);
  keys.k = at.tile(rows, cols, type);
  keys.G = at.tile(rows, cols, DType::fp32);
  return keys;
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

/// Floats in which the `split` warps of each strip join their shares of Aqk and A (join_shares).
constexpr long long share_floats(long long rows, long long split) {
  return (split - 1) * (rows / 16) * (rows / 8) * 2 * 128;
}

}  // namespace wyvern::cuda::kda
