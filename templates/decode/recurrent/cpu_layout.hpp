// What a block of recurrent keeps in scratch.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::recurrent {

/// The state, rows of K or of V as its tensor has it, and a token's vectors.
template <class S>
struct ScratchLayout {
  cpu::TilePlace state;
  cpu::VectorPlace k, erasing, q, decay, u, out, with_k, with_q;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    state = s.STATE_V_FIRST ? at.tile(s.BV, s.K) : at.tile(s.K, s.BV);
    k = at.vector(s.K);
    if (s.ERASE_WRITE) erasing = at.vector(s.K);
    q = at.vector(s.K);
    decay = at.vector(s.K);
    u = at.vector(s.BV);
    out = at.vector(s.BV);
    with_k = at.vector(s.BV);
    with_q = at.vector(s.BV);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::recurrent
