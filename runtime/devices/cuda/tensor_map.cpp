#include "runtime/devices/cuda/tensor_map.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace wyvern::cuda {
namespace {

/// CUtensorMapDataType.
int type_of(DType dtype) {
  switch (dtype) {
    case DType::boolean:
    case DType::float8_e4m3:
    case DType::float8_e5m2: return 0;  // bytes
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
constexpr int kZeros = 0;         // CUtensorMapFloatOOBfill: elements outside the view

/// The driver needs an address before there is one, and older drivers refuse null. It reads
/// nothing.
void* placeholder() { return reinterpret_cast<void*>(std::uintptr_t{1} << 20); }

[[noreturn]] void refuse(const TiledView& v, DType dtype, const std::string& why) {
  throw Error(ErrorKind::kBadInput,
              fmt::format("no tensor map for {} with dims [{}], strides [{}] bytes, box [{}], "
                          "swizzle {}: {}",
                          to_string(dtype), fmt::join(v.dims, ", "), fmt::join(v.strides, ", "),
                          fmt::join(v.box, ", "),
                          v.swizzle == Swizzle::none ? 0 : 16 << static_cast<int>(v.swizzle), why));
}

/// The list as the driver takes it. Negative numbers become too large ones.
template <class To, std::size_t N>
std::array<To, N> as(const FixedList<std::int64_t, N>& list) {
  std::array<To, N> result{};
  std::transform(list.begin(), list.end(), result.begin(),
                 [](std::int64_t value) { return static_cast<To>(value); });
  return result;
}

}  // namespace

TensorMap encode_tiled(const Driver& d, const TiledView& view, DType dtype) {
  if (!has_tensor_maps(d))
    throw Error(ErrorKind::kUnavailable,
                "the NVIDIA driver has no cuTensorMapEncodeTiled and cuTensorMapReplaceAddress; "
                "update it to CUDA 12.0 or newer");
  const std::size_t rank = view.dims.size();
  if (rank == 0 || view.strides.size() + 1 != rank || view.box.size() != rank)
    refuse(view, dtype, "it must have as many dims as box has, and one more than strides");
  auto dims = as<std::uint64_t>(view.dims);
  // The driver would refuse the map of an empty tensor, of which nothing is loaded.
  std::replace(dims.begin(), dims.begin() + rank, std::uint64_t{0}, std::uint64_t{1});
  const auto strides = as<std::uint64_t>(view.strides);
  const auto box = as<std::uint32_t>(view.box);
  constexpr std::array<std::uint32_t, TiledView::kMaxRank> kEveryElement{1, 1, 1, 1, 1};
  TensorMap map{};
  const Result result = d.cuTensorMapEncodeTiled(
      &map, type_of(dtype), static_cast<std::uint32_t>(rank), placeholder(), dims.data(),
      strides.data(), box.data(), kEveryElement.data(), kNoInterleave,
      static_cast<int>(view.swizzle), kL2Promotion, kZeros);
  if (result != 0) refuse(view, dtype, d.describe(result));
  return map;
}

}  // namespace wyvern::cuda
