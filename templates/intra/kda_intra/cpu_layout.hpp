// What a block of kda_intra keeps in scratch.
#pragma once

#include "device/cpu/kda_layout.hpp"

namespace wyvern::kda_intra {

template <class S>
struct ScratchLayout {
  cpu::IntraProductsLayout<S> intra;
  cpu::VectorPlace rate, scale;
  long bytes;

  constexpr explicit ScratchLayout(const S& s) : intra(s) {
    cpu::LayoutBuilder at{intra.bytes};
    rate = at.vector(s.BT);
    scale = at.vector(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_intra
