// Rows of tokens that may lie apart.
#pragma once

#include "device/cuda/ptx.cuh"

namespace wyvern::cuda {

/// The rows of a strided tensor, a token each.
template <class T>
struct TokenRows {
  T* first;
  int64 stride;  ///< elements from a row to the next one

  WYVERN_DEVICE T* row(int64 token) const { return first + token * stride; }
};

}  // namespace wyvern::cuda
