// What a block of recurrent keeps in scratch.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::recurrent {

/// Value columns of a block.
template <class S>
constexpr int block_columns(const S& s) {
  return static_cast<int>(s.OUTPUT_NORM ? s.V : s.BV);
}

/// The state, rows of K or of V as its tensor has it, and a token's vectors.
template <class S>
struct ScratchLayout {
  cpu::TilePlace state;
  cpu::VectorPlace k, erasing, q, decay, u, out, with_k, with_q;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    const int columns = block_columns(s);
    state = s.STATE_V_FIRST ? at.tile(columns, s.K) : at.tile(s.K, columns);
    k = at.vector(s.K);
    if (s.ERASE_WRITE) erasing = at.vector(s.K);
    q = at.vector(s.K);
    decay = at.vector(s.K);
    u = at.vector(columns);
    out = at.vector(columns);
    with_k = at.vector(columns);
    with_q = at.vector(columns);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::recurrent
