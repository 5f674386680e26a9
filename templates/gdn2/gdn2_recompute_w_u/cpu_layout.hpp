// What a block of gdn2_recompute_w_u keeps in scratch.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::gdn2_recompute_w_u {

template <class S>
struct ScratchLayout {
  cpu::TilePlace inverse, queries, keys, gates, factor;
  cpu::VectorPlace ones, q_scale, k_scale;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    inverse = at.tile(s.BT, s.BT);
    queries = at.tile(s.BT, s.BV);
    keys = at.tile(s.BT, s.BV);
    gates = at.tile(s.BT, s.BV);
    factor = at.tile(s.BT, s.BV);
    ones = at.vector(s.BT);
    q_scale = at.vector(s.BT);
    k_scale = at.vector(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::gdn2_recompute_w_u
