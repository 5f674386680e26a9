// What Hopper's instructions take that is neither a number nor a pointer.
#pragma once

#include "device/cuda/types.cuh"
#include "device/tensor_map.hpp"

namespace wyvern::cuda::sm90 {

/// An mbarrier, in shared memory: arrivals of threads and bytes of tensor copies complete
/// its phase, then the next one begins. Phases are counted from 0 and told apart by parity.
struct alignas(8) Barrier {
  uint64 state;
};

/// Where in shared memory wgmma finds an operand.
struct Descriptor {
  uint64 bits;
};

/// Which index of an operand of wgmma is contiguous in memory: the depth k that the product sums
/// over, or the row of A (m) or column of B (n).
enum class Major { k, mn };

/// bf16, as opposed to fp16.
template <class T>
inline constexpr bool kIsBf16 = false;
template <>
inline constexpr bool kIsBf16<bf16> = true;

}  // namespace wyvern::cuda::sm90
