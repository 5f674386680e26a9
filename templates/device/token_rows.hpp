// Rows of tokens that may be strided. For kernels of every device.
#pragma once

#include "device/types.hpp"

namespace wyvern {

/// The rows of a strided tensor, a token each.
template <class T>
struct TokenRows {
  T* first;
  int64 stride;  ///< elements from a row to the next one

  T* row(int64 token) const { return first + token * stride; }
  /// The rows from `token` on, each from `column` on.
  TokenRows at(int64 token, int64 column) const { return {row(token) + column, stride}; }
};

}  // namespace wyvern
