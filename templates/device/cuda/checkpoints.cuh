// The checkpoints of a scan over a sequence, found by a warp.
#pragma once

#include "device/checkpoints.hpp"
#include "device/cuda/ptx.cuh"

namespace wyvern::cuda {

/// Those of sequence n behind its first `passed` tokens. By all lanes of a warp.
template <class S, class Index>
WYVERN_DEVICE Checkpoints<S> find_checkpoints(uint32 passed, int n, const Extents& e,
                                              const int32* seq_offsets,
                                              const Index* checkpoint_offsets) {
  uint32 before = count_checkpoints<S>(n, e, seq_offsets, lane_index(), 32);
  if constexpr (S::CHECKPOINT_EVERY != 0 && S::VARLEN)
    for (int mask = 16; mask > 0; mask /= 2) before += shuffle_xor(before, mask);
  return checkpoints_behind<S>(passed, n, before, e, checkpoint_offsets);
}

}  // namespace wyvern::cuda
