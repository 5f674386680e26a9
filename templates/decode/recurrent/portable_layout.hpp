// What a block of recurrent.portable keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::recurrent {

/// With OUTPUT_NORM, whether a block's registers have all columns of a state.
template <class S>
constexpr bool all_columns_at_once(const S& s) {
  return s.OUTPUT_NORM && s.BV >= s.V;
}

/// Rows of o whose sums of squares are in shared memory: two, one read while the next is written,
/// or as many as a block goes through twice at a time.
template <class S>
constexpr int sum_rows(const S& s) {
  return all_columns_at_once(s) ? 2 : 256;
}

template <class S>
struct PortableLayout {
  cuda::ArrayPlace squares;  ///< of rows of o, with OUTPUT_NORM: one a warp
  int bytes;

  constexpr explicit PortableLayout(const S& s) {
    cuda::LayoutBuilder at;
    if (s.OUTPUT_NORM) squares = at.array(sum_rows(s) * s.num_warps);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::recurrent
