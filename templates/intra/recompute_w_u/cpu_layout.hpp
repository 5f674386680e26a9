// What a block of recompute_w_u keeps in scratch.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::recompute_w_u {

template <class S>
struct ScratchLayout {
  cpu::TilePlace inverse, factor, result;
  cpu::VectorPlace rate, decay, key_scale;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    inverse = at.tile(s.BT, s.BT);
    factor = at.tile(s.BT, s.BV);
    result = at.tile(s.BT, s.BV);
    rate = at.vector(s.BT);
    decay = at.vector(s.BT);
    key_scale = at.vector(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::recompute_w_u
