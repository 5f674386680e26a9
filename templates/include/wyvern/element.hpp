// Element types and precisions. Compiled by the host and by every kernel, so nothing is included.
#pragma once

namespace wyvern {

/// Element types of tensors. The two float8 types are those of OCP: e4m3 has no infinities and 448
/// as its largest number, e5m2 has infinities and 57344.
enum class DType : unsigned char {
  fp32,
  fp16,
  bf16,
  int32,
  int64,
  boolean,
  float8_e4m3,
  float8_e5m2
};

constexpr bool is_float8(DType type) noexcept {
  return type == DType::float8_e4m3 || type == DType::float8_e5m2;
}

/// How fp32 matrix products and the triangular inverse are computed, least accurate first.
/// tf32x3 is the three-pass split of each operand into a tf32 head and tail.
enum class Precision : unsigned char { tf32, tf32x3, ieee };

/// Bytes per element.
constexpr decltype(sizeof(0)) size_of(DType type) noexcept {
  switch (type) {
    case DType::boolean:
    case DType::float8_e4m3:
    case DType::float8_e5m2: return 1;
    case DType::fp16:
    case DType::bf16: return 2;
    case DType::fp32:
    case DType::int32: return 4;
    case DType::int64: return 8;
  }
  return 0;
}

}  // namespace wyvern
