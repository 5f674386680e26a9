// What a block of scaled_dot_kkt keeps in scratch.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::scaled_dot_kkt {

template <class S>
struct ScratchLayout {
  cpu::TilePlace keys, products, result;
  cpu::VectorPlace decay, rate, key_scale;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    keys = at.tile(s.K, s.BT);  // transposed
    products = at.tile(s.BT, s.BT);
    result = at.tile(s.BT, s.BT);
    decay = at.vector(s.BT);
    rate = at.vector(s.BT);
    key_scale = at.vector(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::scaled_dot_kkt
