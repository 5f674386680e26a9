// What a block of kda_wy_dqkg keeps in scratch.
#pragma once

#include "device/cpu/kda_layout.hpp"

namespace wyvern::kda_wy_dqkg {

template <class S>
struct ScratchLayout {
  cpu::RateBackwardLayout<S> backward;
  cpu::IntraBackwardLayout work;
  cpu::ProductGradientsLayout d;
  cpu::VectorPlace ones, row_sums;
  long bytes;

  constexpr explicit ScratchLayout(const S& s) : backward(s) {
    cpu::LayoutBuilder at{backward.bytes};
    work = at.part<cpu::IntraBackwardLayout>(s.BT, s.BK);
    d = at.part<cpu::ProductGradientsLayout>(s.BT);
    ones = at.vector(s.BT);
    row_sums = at.vector(s.ERASE_WRITE ? 0 : cpu::row_sums(s.BT));
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_wy_dqkg
