// Views of tensors for TMA: the tiles of a tensor that TMA loads to shared memory or stores.
#pragma once

#include <cstdint>

#include "templates/signature.hpp"

namespace wyvern {

/// How a tile's 16-byte pieces are permuted in shared memory, against bank conflicts between rows:
/// within this many bytes, which the tile's innermost dimension must not exceed.
enum class Swizzle : std::uint8_t { none, bytes32, bytes64, bytes128 };

/// A view of a tensor, and the box that one TMA load moves. Dimensions count from the innermost,
/// which is contiguous, and need not be those of the tensor. Elements outside the view load as
/// zeros. The hardware's conditions: at most 2^32 elements a dimension, strides that are multiples
/// of 16 bytes, boxes of 1 to 256 elements a dimension with an innermost extent of a multiple of 16
/// bytes.
struct TiledView {
  static constexpr std::size_t kMaxRank = 5;
  FixedList<std::int64_t, kMaxRank> dims{};         ///< elements
  FixedList<std::int64_t, kMaxRank - 1> strides{};  ///< bytes, of dims 1 and on
  FixedList<std::int64_t, kMaxRank> box{};          ///< elements
  Swizzle swizzle = Swizzle::none;
};

/// The view with a stride of `bytes` bytes in dimension 1.
inline TiledView with_rows_apart(const TiledView& view, std::int64_t bytes) {
  TiledView apart{.dims = view.dims, .box = view.box, .swizzle = view.swizzle};
  for (std::size_t i = 0; i < view.strides.size(); ++i)
    apart.strides.push_back(i == 0 ? bytes : view.strides[i]);
  return apart;
}

}  // namespace wyvern
