// Tensor maps: how the hardware of Hopper and later is told of a tensor whose tiles it copies.
#pragma once

#include <wyvern/dtype.hpp>

#include <array>
#include <cstdint>

#include "runtime/devices/cuda/cuda_driver.hpp"

namespace wyvern::cuda {

/// How a tile's 16-byte pieces are permuted in shared memory, so that columns meet no bank twice:
/// within so many bytes, which the tile's innermost dimension must not exceed.
enum class Swizzle : std::uint8_t { none, bytes32, bytes64, bytes128 };

/// What is read where a tile reaches beyond the tensor. NaN is for floating-point types.
enum class Fill : std::uint8_t { zero, nan };

/// A tensor in device memory and the tiles that are copied of it. Dimensions count from the
/// innermost, which is contiguous. The driver's conditions: an address of 16 bytes' alignment,
/// strides that are multiples of 16, boxes of 1 to 256 elements a dimension with an innermost
/// extent of a multiple of 16 bytes.
struct TiledTensor {
  static constexpr int kMaxRank = 5;
  DType dtype = DType::bf16;
  int rank = 1;
  std::array<std::uint64_t, kMaxRank> dims{};         ///< elements
  std::array<std::uint64_t, kMaxRank - 1> strides{};  ///< bytes, of dims 1 and on
  std::array<std::uint32_t, kMaxRank> box{};          ///< elements of a tile
  std::array<std::uint32_t, kMaxRank> element_strides{1, 1, 1, 1, 1};
  Swizzle swizzle = Swizzle::none;
  Fill fill = Fill::zero;
};

/// Makes `map` for the tensor at `address`. Allocates nothing, enqueues nothing; thread-safe.
/// Throws Error(kUnavailable) when the driver has no tensor maps, Error(kBadInput) with the figures
/// when it refuses them.
void encode_tiled(const Driver& d, const TiledTensor& tensor, const void* address, TensorMap& map);

}  // namespace wyvern::cuda
