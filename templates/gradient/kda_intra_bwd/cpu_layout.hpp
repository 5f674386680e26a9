// What a block of kda_intra_bwd keeps in scratch.
#pragma once

#include "device/cpu/kda_layout.hpp"

namespace wyvern::kda_intra_bwd {

template <class S>
struct ScratchLayout {
  cpu::KeyTilesLayout tiles;
  cpu::IntraBackwardLayout work;
  cpu::ProductGradientsLayout d;
  cpu::VectorPlace rate, row_sums;  ///< without ERASE_WRITE
  cpu::TilePlace rates, gradients;  ///< with it
  cpu::VectorPlace q_scale, k_scale, ones;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    tiles = at.part<cpu::KeyTilesLayout>(s.BT, s.BK);
    work = at.part<cpu::IntraBackwardLayout>(s.BT, s.BK);
    d = at.part<cpu::ProductGradientsLayout>(s.BT);
    q_scale = at.vector(s.BT);
    k_scale = at.vector(s.BT);
    ones = at.vector(s.BT);
    if (s.ERASE_WRITE) {
      rates = at.tile(s.BT, s.BK);
      gradients = at.tile(s.BT, s.BK);
    } else {
      rate = at.vector(s.BT);
      row_sums = at.vector(cpu::row_sums(s.BT));
    }
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_intra_bwd
