// What a block of bwd_dv_local keeps in scratch.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::bwd_dv_local {

template <class S>
struct ScratchLayout {
  cpu::TilePlace queries, keys, products, attention, gradients, result;
  cpu::VectorPlace gate, query_scale, key_scale;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    queries = at.tile(s.BT, s.K);
    keys = at.tile(s.K, s.BT);  // transposed
    products = at.tile(s.BT, s.BT);
    attention = at.tile(s.BT, s.BT);
    gradients = at.tile(s.BT, s.BV);
    result = at.tile(s.BT, s.BV);
    gate = at.vector(s.BT);
    query_scale = at.vector(s.BT);
    key_scale = at.vector(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::bwd_dv_local
