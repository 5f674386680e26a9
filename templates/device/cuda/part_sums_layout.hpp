// The shared memory of part_sums.cuh.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::cuda {

/// BC sums of each warp.
template <class S>
struct PartSumsLayout {
  ArrayPlace totals;
  int bytes;

  constexpr explicit PartSumsLayout(const S& s) {
    LayoutBuilder at;
    totals = at.array(s.num_warps * s.BC);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::cuda
