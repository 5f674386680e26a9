// Places in shared memory for Hopper's instructions, in addition to those of
// device/cuda/layout.hpp. A layout with such places starts at swizzled_memory() of ptx.cuh.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::cuda::sm90 {

/// What tiles with 128-byte swizzle, and so layouts that hold them, are aligned to.
constexpr int kSwizzleAlignment = 1024;

/// A SwizzledTile, `offset` bytes from the layout's start.
struct SwizzledPlace {
  int offset = 0;
  int rows = 0;
  int cols = 0;
  DType type = DType::bf16;
};

/// `count` mbarriers, `offset` bytes from the layout's start.
struct BarrierPlace {
  int offset = 0;
  int count = 0;
};

/// Room for a tile of 16-bit elements; `cols` is a multiple of 64.
constexpr SwizzledPlace swizzled_tile(LayoutBuilder& at, long long rows, long long cols,
                                      DType type) {
  at.bytes = (at.bytes + kSwizzleAlignment - 1) / kSwizzleAlignment * kSwizzleAlignment;
  return {at.take(rows * cols * static_cast<long long>(size_of(type))), static_cast<int>(rows),
          static_cast<int>(cols), type};
}

/// Room for `count` mbarriers of 8 bytes.
constexpr BarrierPlace barriers(LayoutBuilder& at, long long count) {
  return {at.take(count * 8), static_cast<int>(count)};
}

/// The place of a channel's factor, for scale_columns() of state.cuh: a lane that has
/// channels 8 i + 2 c and the next of all i finds them one after another, and lanes of four c in
/// different banks.
constexpr int channel_stride(long long K) { return static_cast<int>(K / 4 + 4); }
constexpr int channel_floats(long long K) { return 4 * channel_stride(K); }
constexpr int channel_place(long long K, int channel) {
  return channel % 8 / 2 * channel_stride(K) + channel / 8 * 2 + channel % 2;
}

}  // namespace wyvern::cuda::sm90
