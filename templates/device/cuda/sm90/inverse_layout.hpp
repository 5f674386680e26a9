// What a warpgroup that inverts a chunk's matrix keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::cuda::sm90 {

/// Blocks of the inverse, and a product, that warps hand to each other.
struct InverseLayout {
  TilePlace inverse, product;

  constexpr explicit InverseLayout(LayoutBuilder& at)
      : inverse(at.tile(64, 64, DType::fp16)), product(at.tile(16, 32, DType::fp16)) {}
  InverseLayout() = default;
};

}  // namespace wyvern::cuda::sm90
