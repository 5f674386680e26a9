// What the lanes of a warp tell each other. All of them take part.
#pragma once

#include "device/cuda/sm90/ptx.cuh"

namespace wyvern::cuda::sm90 {

/// The sum over the lanes, always in the same order.
WYVERN_DEVICE float sum_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

/// What that lane has.
WYVERN_DEVICE int from_lane(int x, int lane) {
  const float moved = shuffle(bits_float(static_cast<uint32>(x)), lane);
  return uniform(static_cast<int>(float_bits(moved)));
}
WYVERN_DEVICE int64 from_lane(int64 x, int lane) {
  const auto bits = static_cast<uint64>(x);
  const auto low = static_cast<uint32>(from_lane(static_cast<int>(bits & 0xFFFFFFFFU), lane));
  const auto high = static_cast<uint32>(from_lane(static_cast<int>(bits >> 32U), lane));
  return static_cast<int64>(static_cast<uint64>(high) << 32U | low);
}

}  // namespace wyvern::cuda::sm90
