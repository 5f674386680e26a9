// The places in shared memory of what blocks of gdn2 keep there: parts of their templates' layouts.
#pragma once

#include "device/cuda/kda_layout.hpp"

namespace wyvern::cuda::gdn2 {

/// A KeyTile: kda's, and the erase gate in a type of its own.
struct KeyPlace {
  kda::KeyPlace keys;
  TilePlace erase;
};
constexpr KeyPlace take_keys(LayoutBuilder& at, long long rows, long long cols, DType type,
                             DType gate) {
  KeyPlace place;
  place.keys = kda::take_keys(at, rows, cols, type);
  place.erase = at.tile(rows, cols, gate);
  return place;
}

/// Columns of values and of their write gate.
struct ValuePlace {
  TilePlace v, write;
};
constexpr ValuePlace take_values(LayoutBuilder& at, long long rows, long long cols, DType type,
                                 DType gate) {
  ValuePlace place;
  place.v = at.tile(rows, cols, type);
  place.write = at.tile(rows, cols, gate);
  return place;
}

}  // namespace wyvern::cuda::gdn2
