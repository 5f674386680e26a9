#include "runtime/devices/cuda/tensor_map.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>

namespace wyvern::cuda {
namespace {

/// CUtensorMapDataType.
int type_of(DType dtype) {
  switch (dtype) {
    case DType::int32: return 3;
    case DType::int64: return 5;
    case DType::fp16: return 6;
    case DType::fp32: return 7;
    case DType::bf16: return 9;
  }
  return -1;
}

constexpr int kNoInterleave = 0;  // CUtensorMapInterleave
constexpr int kL2Promotion = 2;   // CUtensorMapL2promotion: lines of 128 bytes

[[noreturn]] void refuse(const TiledTensor& t, const void* address, const std::string& why) {
  const auto first = [](const auto& values, int count) {
    return std::span(values).first(
        static_cast<std::size_t>(std::clamp(count, 0, static_cast<int>(values.size()))));
  };
  throw Error(
      ErrorKind::kBadInput,
      fmt::format("no tensor map of rank {} for {} at {} with dims [{}], strides [{}] bytes, box "
                  "[{}], element strides [{}], swizzle {}: {}",
                  t.rank, to_string(t.dtype), address, fmt::join(first(t.dims, t.rank), ", "),
                  fmt::join(first(t.strides, t.rank - 1), ", "),
                  fmt::join(first(t.box, t.rank), ", "),
                  fmt::join(first(t.element_strides, t.rank), ", "),
                  t.swizzle == Swizzle::none ? 0 : 16 << static_cast<int>(t.swizzle), why));
}

}  // namespace

void encode_tiled(const Driver& d, const TiledTensor& t, const void* address, TensorMap& map) {
  if (d.cuTensorMapEncodeTiled == nullptr)
    throw Error(ErrorKind::kUnavailable,
                "the NVIDIA driver has no cuTensorMapEncodeTiled; update it to CUDA 12.0 or newer");
  if (t.rank < 1 || t.rank > TiledTensor::kMaxRank)
    refuse(t, address, fmt::format("the rank must be 1 to {}", TiledTensor::kMaxRank));
  const Result result = d.cuTensorMapEncodeTiled(
      &map, type_of(t.dtype), static_cast<std::uint32_t>(t.rank), const_cast<void*>(address),
      t.dims.data(), t.strides.data(), t.box.data(), t.element_strides.data(), kNoInterleave,
      static_cast<int>(t.swizzle), kL2Promotion, static_cast<int>(t.fill));
  if (result != 0) refuse(t, address, d.describe(result));
}

}  // namespace wyvern::cuda
