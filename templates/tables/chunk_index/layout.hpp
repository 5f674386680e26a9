// What the block of chunk_index keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::chunk_index {

inline constexpr int kThreads = 1024;

/// An integer of each warp.
struct SharedLayout {
  cuda::ArrayPlace totals;
  int bytes;

  constexpr SharedLayout() {
    cuda::LayoutBuilder at;
    totals = at.array(kThreads / 32, DType::int32);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::chunk_index
