// Numbers of one lane for all lanes of a warp. All of them take part.
#pragma once

#include "device/cuda/sm90/ptx.cuh"

namespace wyvern::cuda::sm90 {

/// The number of that lane.
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
