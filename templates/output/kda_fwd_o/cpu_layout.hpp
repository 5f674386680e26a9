// What a block of kda_fwd_o keeps in scratch.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::kda_fwd_o {

template <class S>
struct ScratchLayout {
  cpu::TilePlace queries, attention, state, result;
  cpu::VectorPlace ones;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    queries = at.tile(s.BT, s.K);
    attention = at.tile(s.BT, s.BT);
    state = at.tile(s.K > s.BT ? s.K : s.BT, s.BV);  // then V'
    result = at.tile(s.BT, s.BV);
    ones = at.vector(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_fwd_o
