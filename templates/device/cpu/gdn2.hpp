// Shared by gdn2's block functions: elementwise gates of keys and values.
#pragma once

#include "device/cpu/tile.hpp"

namespace wyvern::cpu {

/// dst = x * y over `rows` rows; dst may be one of them. Padding stays 0 where it is 0.
template <int Cols>
[[gnu::noinline]] static void multiply_elements(Tile<Cols> x, Tile<Cols> y, int rows, int columns,
                                                Tile<Cols> dst) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; c += kLanes)
      store(dst.row(r) + c, load(x.row(r) + c) * load(y.row(r) + c));
}

}  // namespace wyvern::cpu
