// The parameter by which a kernel loads or stores tiles of a tensor by TMA. Compiled by the host
// and by the kernels that use it, so that both have the same layout.
#pragma once

namespace wyvern {

/// A tensor's address, dimensions, strides, box and swizzle as the device encodes them; a kernel's
/// parameter by value, `const __grid_constant__`. Its view: templates/tiled_view.hpp.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};
static_assert(sizeof(TensorMap) == 128);

}  // namespace wyvern
