// What a block of fwd_o keeps in scratch.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::fwd_o {

template <class S>
struct ScratchLayout {
  cpu::TilePlace queries, keys, products, attention, state, result;
  cpu::VectorPlace gate, decay, query_scale, key_scale;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    queries = at.tile(s.BT, s.K);
    keys = at.tile(s.K, s.BT);  // transposed
    products = at.tile(s.BT, s.BT);
    attention = at.tile(s.BT, s.BT);
    state = at.tile(s.K > s.BT ? s.K : s.BT, s.BV);  // then V'
    result = at.tile(s.BT, s.BV);
    gate = at.vector(s.BT);
    decay = at.vector(s.BT);
    query_scale = at.vector(s.BT);
    key_scale = at.vector(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::fwd_o
