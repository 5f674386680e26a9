// How a kernel is told of a tensor whose tiles tensor copies bring. Compiled by the host and by the
// kernels that use it, so that both have one layout of it.
#pragma once

namespace wyvern {

/// A tensor's address, dimensions, strides, box and swizzle as the device encodes them; a kernel's
/// parameter by value, `const __grid_constant__`. What view it is of: templates/tiled_view.hpp.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};
static_assert(sizeof(TensorMap) == 128);

}  // namespace wyvern
