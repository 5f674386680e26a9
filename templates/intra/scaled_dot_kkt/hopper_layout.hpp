// What a block of scaled_dot_kkt.hopper keeps in shared memory.
#pragma once

#include "device/cuda/sm90/layout.hpp"

namespace wyvern::scaled_dot_kkt {

/// The chunk's keys of one head and the mbarrier of their TMA load; the summed gate, beta and the
/// scales of the chunk's rows.
template <class S>
struct HopperLayout {
  cuda::sm90::SwizzledPlace keys;
  cuda::sm90::BarrierPlace arrived;
  cuda::ArrayPlace G, beta, k_rstd;
  int bytes;

  constexpr explicit HopperLayout(const S& s) {
    cuda::LayoutBuilder at;
    keys = cuda::sm90::swizzled_tile(at, s.BT, s.K, s.DTYPE);
    arrived = cuda::sm90::barriers(at, 1);
    G = at.array(s.BT);
    beta = at.array(s.BT);
    if (s.QK_L2NORM) k_rstd = at.array(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::scaled_dot_kkt
