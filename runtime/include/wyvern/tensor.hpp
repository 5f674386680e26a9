// A non-owning view of a tensor.
#pragma once

#include <wyvern/dtype.hpp>
#include <wyvern/error.hpp>
#include <wyvern/export.hpp>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace wyvern WYVERN_API {

inline constexpr int kMaxRank = 5;

/// Pointer, dtype, shape and strides; owns nothing. Fields follow DLPack's DLTensor: strides count
/// elements, and the pointer is on the device the operator was prepared for. Tensors must be
/// contiguous (row-major strides; a dimension of size 1 may have any) and aligned to 16 bytes.
///
/// Where an operator's plan accepts a tensor [B, T, ...] with strided rows (TensorSpec::strided),
/// its rows of tokens may be strided, as in a slice of a projection: each row is contiguous, the
/// stride between rows is a multiple of 16 bytes below 2^40 and at least a row, and the stride
/// between sequences of a batch is T row strides. A launch neither reads nor writes memory between
/// rows. Between rows that it writes may be those of tensors with the same stride, no others.
///
/// The slots of a pool of states [slots, HV, ...] may be strided likewise: each slot is contiguous,
/// the stride between slots is a multiple of 16 bytes below 2^40 and at least a slot.
struct TensorView {
  void* data = nullptr;  ///< null: the tensor is absent
  DType dtype = DType::fp32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};

  TensorView() = default;
  /// A contiguous tensor. Throws Error(kBadInput) for more than kMaxRank dimensions.
  TensorView(void* pointer, DType type, std::initializer_list<std::int64_t> dims)
      : data(pointer), dtype(type), rank(static_cast<int>(dims.size())) {
    check_rank();
    int i = 0;
    for (const std::int64_t dim : dims) shape[static_cast<std::size_t>(i++)] = dim;
    std::int64_t stride = 1;
    for (i = rank - 1; i >= 0; --i) {
      strides[static_cast<std::size_t>(i)] = stride;
      stride *= shape[static_cast<std::size_t>(i)];
    }
  }

  [[nodiscard]] bool present() const noexcept { return data != nullptr; }
  /// Throws Error(kBadInput) for a rank outside 0 to kMaxRank.
  [[nodiscard]] std::int64_t elements() const {
    check_rank();
    std::int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= shape[static_cast<std::size_t>(i)];
    return count;
  }

 private:
  void check_rank() const {
    if (rank < 0 || rank > kMaxRank)
      throw Error(ErrorKind::kBadInput, "a tensor's rank is " + std::to_string(rank) +
                                            "; it must be between 0 and " +
                                            std::to_string(kMaxRank));
  }
};

}  // namespace wyvern WYVERN_API
