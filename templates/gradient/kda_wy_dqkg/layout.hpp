// What a block of kda_wy_dqkg keeps in shared memory.
#pragma once

#include "device/cuda/kda_layout.hpp"

namespace wyvern::kda_wy_dqkg {

/// The layout of the gradients through states, then dAqk and dA with dAqk's diagonal.
template <class S>
struct SharedLayout {
  cuda::TilePlace dAqk, dA;
  cuda::ArrayPlace diagonal;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at{cuda::kda::StateBackwardLayout<S>(s).bytes};
    dAqk = at.tile(s.BT, s.BT, cuda::kda::operand_of(s.DTYPE));
    dA = at.tile(s.BT, s.BT, cuda::kda::operand_of(s.DTYPE));
    diagonal = at.array(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_wy_dqkg
