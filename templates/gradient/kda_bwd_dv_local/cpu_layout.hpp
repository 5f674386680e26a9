// What a block of kda_bwd_dv_local keeps in scratch.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::kda_bwd_dv_local {

template <class S>
struct ScratchLayout {
  cpu::TilePlace attention, gradient, result;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    attention = at.tile(s.BT, s.BT);
    gradient = at.tile(s.BT, s.BV);
    result = at.tile(s.BT, s.BV);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_bwd_dv_local
