// What a block of gdn2_intra keeps in scratch.
#pragma once

#include "device/cpu/kda_layout.hpp"

namespace wyvern::gdn2_intra {

template <class S>
struct ScratchLayout {
  cpu::IntraProductsLayout<S> intra;
  cpu::TilePlace erasing;
  cpu::VectorPlace scale;
  long bytes;

  constexpr explicit ScratchLayout(const S& s) : intra(s) {
    cpu::LayoutBuilder at{intra.bytes};
    erasing = at.tile(s.BT, s.K);
    scale = at.vector(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::gdn2_intra
