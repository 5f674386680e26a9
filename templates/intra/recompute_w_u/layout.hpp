// What a block of recompute_w_u keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::recompute_w_u {

/// The inverse, the scale of its columns, and a tile of keys or values in one place.
template <class S>
struct SharedLayout {
  cuda::TilePlace inverse;
  cuda::ArrayPlace scale;
  cuda::TilePlace keys, values;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    inverse = at.tile(s.BT, s.BT, s.DTYPE);
    scale = at.array(s.BT);
    cuda::LayoutBuilder same_place = at;
    keys = at.tile(s.BT, s.BK, s.DTYPE);
    values = same_place.tile(s.BT, s.BV, s.DTYPE);
    at.cover(same_place);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::recompute_w_u
