// Reductions over the lanes of a warp. All lanes take part.
#pragma once

#include "device/cuda/ptx.cuh"

namespace wyvern::cuda {

/// The sum over the lanes, always in the same order.
WYVERN_DEVICE float sum_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

/// The largest of the lanes' numbers.
WYVERN_DEVICE float max_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = maximum(x, shuffle_xor(x, mask));
  return x;
}

}  // namespace wyvern::cuda
