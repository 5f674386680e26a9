// Element types, as they are spelled on the command line, in files and in problem keys.
#pragma once

#include <wyvern/element.hpp>
#include <wyvern/export.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace wyvern WYVERN_API {

constexpr bool is_floating(DType type) noexcept {
  return type == DType::fp32 || type == DType::fp16 || type == DType::bf16 || is_float8(type);
}

/// "fp32", "fp16", "bf16", "int32", "int64", "boolean", "float8_e4m3", "float8_e5m2".
std::string_view to_string(DType type) noexcept;
[[nodiscard]] std::optional<DType> parse_dtype(std::string_view text) noexcept;

std::string_view to_string(Precision precision) noexcept;
[[nodiscard]] std::optional<Precision> parse_precision(std::string_view text) noexcept;

/// Round-to-nearest-even conversions between float and the storage formats of fp16 and bf16.
[[nodiscard]] std::uint16_t float_to_bf16(float value) noexcept;
[[nodiscard]] float bf16_to_float(std::uint16_t bits) noexcept;
[[nodiscard]] std::uint16_t float_to_fp16(float value) noexcept;
[[nodiscard]] float fp16_to_float(std::uint16_t bits) noexcept;
/// The same for the float8 types; numbers beyond the largest finite one become that one.
[[nodiscard]] std::uint8_t float_to_e4m3(float value) noexcept;
[[nodiscard]] float e4m3_to_float(std::uint8_t bits) noexcept;
[[nodiscard]] std::uint8_t float_to_e5m2(float value) noexcept;
[[nodiscard]] float e5m2_to_float(std::uint8_t bits) noexcept;

}  // namespace wyvern WYVERN_API
