// What a block of gdn2_chunk_bwd keeps in scratch.
#pragma once

#include "device/cpu/kda_layout.hpp"

namespace wyvern::gdn2_chunk_bwd {

template <class S>
struct ScratchLayout {
  cpu::StateBackwardLayout<S> state;
  cpu::IntraBackwardLayout work;
  cpu::ProductGradientsLayout d;
  cpu::VectorPlace ones;
  cpu::TilePlace rates, gradients;
  long bytes;

  constexpr explicit ScratchLayout(const S& s) : state(s) {
    cpu::LayoutBuilder at{state.bytes};
    work = at.part<cpu::IntraBackwardLayout>(s.BT, s.BK);
    d = at.part<cpu::ProductGradientsLayout>(s.BT);
    ones = at.vector(s.BT);
    rates = at.tile(s.BT, s.BK);
    gradients = at.tile(s.BT, s.BK);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::gdn2_chunk_bwd
