// Element types, as they are spelled on the command line, in files and in problem keys.
#pragma once

#include <wyvern/export.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace wyvern WYVERN_API {

enum class DType : std::uint8_t { fp32, fp16, bf16, int32, int64 };

/// Bytes per element.
constexpr std::size_t size_of(DType type) noexcept {
  switch (type) {
    case DType::fp16:
    case DType::bf16: return 2;
    case DType::fp32:
    case DType::int32: return 4;
    case DType::int64: return 8;
  }
  return 0;
}

constexpr bool is_floating(DType type) noexcept {
  return type == DType::fp32 || type == DType::fp16 || type == DType::bf16;
}

/// "fp32", "fp16", "bf16", "int32", "int64".
std::string_view to_string(DType type) noexcept;
[[nodiscard]] std::optional<DType> parse_dtype(std::string_view text) noexcept;

/// How fp32 matrix products and the triangular inverse are computed, least accurate first.
/// tf32x3 is the three-pass split of each operand into a tf32 head and tail.
enum class Precision : std::uint8_t { tf32, tf32x3, ieee };

std::string_view to_string(Precision precision) noexcept;
[[nodiscard]] std::optional<Precision> parse_precision(std::string_view text) noexcept;

/// Round-to-nearest-even conversions between float and the storage formats of fp16 and bf16.
[[nodiscard]] std::uint16_t float_to_bf16(float value) noexcept;
[[nodiscard]] float bf16_to_float(std::uint16_t bits) noexcept;
[[nodiscard]] std::uint16_t float_to_fp16(float value) noexcept;
[[nodiscard]] float fp16_to_float(std::uint16_t bits) noexcept;

}  // namespace wyvern WYVERN_API
