// Shared memory of blocks of the layer's templates.
#pragma once

#include "device/cuda/layout.hpp"
#include "device/cuda/part_sums_layout.hpp"
#include "device/extents.hpp"

namespace wyvern::output_norm_bwd {

/// The longest rows that the lanes of a warp have in registers; longer ones are read twice.
constexpr int kMostHeld = 512;

/// Each warp's part of the weight's gradient, or of longer rows what all columns of them need.
template <class S>
struct SharedLayout {
  cuda::ArrayPlace weight, rstd, along;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    if (s.V <= kMostHeld) {
      weight = at.array(s.num_warps * s.V);
    } else {
      rstd = at.array(kNormPartRows);
      along = at.array(kNormPartRows);
    }
    bytes = at.bytes;
  }
};

}  // namespace wyvern::output_norm_bwd

namespace wyvern::layer_sum {

/// Columns of a block that sums gradients of the convolution's weights.
constexpr int kConvSumColumns = 32;

/// Of the widest block.
template <class S>
constexpr int shared_bytes(const S& s) {
  S wide = s;
  if (wide.BC < kConvSumColumns) wide.BC = kConvSumColumns;
  return cuda::PartSumsLayout(wide).bytes;
}

}  // namespace wyvern::layer_sum

namespace wyvern::short_conv_step {

/// Channels of a thread, side by side in rows: at most 4, so that many threads share the bytes of a
/// few sequences.
template <class S>
constexpr int channels_of_thread(const S& s) {
  int count = 4;
  while (s.K % count != 0 || s.V % count != 0) count /= 2;
  return count;
}

}  // namespace wyvern::short_conv_step

namespace wyvern::short_conv_bwd {

/// Channels of a lane of a block, whose lanes have channels side by side: at most 16 bytes of a row
/// and at most 4, of which all gradients stay in registers.
constexpr int kMostVector = 4;

/// Warps of a multiprocessor, of at most 168 registers a thread, or of fp32 beside a bias 255.
template <class S>
constexpr int resident_warps(const S& s) {
  return s.HAS_CONV_BIAS && s.DTYPE == DType::fp32 ? 8 : 12;
}

/// Each warp's part of the gradients of its lanes' weights and biases.
template <class S>
struct SharedLayout {
  cuda::ArrayPlace weight, bias;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    weight = at.array(s.num_warps * 32 * kMostVector * s.CONV_WIDTH);
    bias = at.array(s.HAS_CONV_BIAS ? s.num_warps * 32 * kMostVector : 0);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::short_conv_bwd
