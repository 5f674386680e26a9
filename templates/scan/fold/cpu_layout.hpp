// What a block of fold keeps in scratch.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::fold {

template <class S>
struct ScratchLayout {
  cpu::TilePlace state, next, M;
  cpu::VectorPlace ones;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    state = at.tile(s.K, s.BV);
    next = at.tile(s.K, s.BV);
    M = at.tile(s.TRANSITION ? s.K : 0, s.K);
    ones = at.vector(s.K + 8);  // whole kTileRows
    bytes = at.bytes;
  }
};

}  // namespace wyvern::fold
