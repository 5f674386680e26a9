// The float8 types as bits, for the host and kernels of every device: one number or a vector. F is
// float or a vector of it, U the unsigned integers of 32 bits of as many lanes.
#pragma once

#include "include/wyvern/element.hpp"

namespace wyvern {

/// Sign, exponent, kMantissa bits.
template <DType type>
struct Float8;
template <>
struct Float8<DType::float8_e4m3> {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr float kLargest = 448.0F;
  static constexpr unsigned int kFirstSpecial =
      0x7F;  ///< the least code that is not a finite number
  static constexpr unsigned int kSpecialBits = 0x7FC00000;  ///< added to its place in a float
};
template <>
struct Float8<DType::float8_e5m2> {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr float kLargest = 57344.0F;
  static constexpr unsigned int kFirstSpecial = 0x7C;
  static constexpr unsigned int kSpecialBits = 224U << 23;
};

/// The numbers encoded by the lowest 8 bits of each lane of `code`.
template <DType type, class F, class U>
inline F float8_value(U code) {
  using Format = Float8<type>;
  constexpr unsigned int kOne = 1U << 23, kOffset = (127U - Format::kBias) << 23;
  const U magnitude = (code & 0x7FU) << (23 - Format::kMantissa);
  const F normal = __builtin_bit_cast(F, magnitude + kOffset);
  // Without a subnormal float, which a processor may take for 0.
  const F least = __builtin_bit_cast(F, U{} + (kOffset + kOne));
  const F subnormal = __builtin_bit_cast(F, magnitude + (kOffset + kOne)) - least;
  const F finite = magnitude >= kOne ? normal : subnormal;
  const F special = __builtin_bit_cast(F, magnitude | Format::kSpecialBits);
  const F value = (code & 0x7FU) >= Format::kFirstSpecial ? special : finite;
  return __builtin_bit_cast(F, __builtin_bit_cast(U, value) | (code & 0x80U) << 24);
}

/// The codes of numbers, rounded to nearest even; numbers beyond the largest finite one become that
/// one, a NaN stays one.
template <DType type, class U, class F>
inline U float8_code(F value) {
  using Format = Float8<type>;
  constexpr int kShift = 23 - Format::kMantissa;
  constexpr unsigned int kOffset = (127U - Format::kBias) << 23;
  constexpr unsigned int kHalf = (1U << (kShift - 1)) - 1;
  constexpr unsigned int kAlign = (127U + 24 - Format::kBias - Format::kMantissa) << 23;
  const U bits = __builtin_bit_cast(U, value);
  const U given = bits & 0x7FFFFFFFU;
  const U largest = U{} + __builtin_bit_cast(unsigned int, Format::kLargest);
  const U magnitude = given > largest ? largest : given;
  const U normal = (magnitude + kHalf + ((magnitude >> kShift) & 1U) - kOffset) >> kShift;
  // The sum's last place is a subnormal's, so that the hardware rounds it.
  const F align = __builtin_bit_cast(F, U{} + kAlign);
  const U subnormal = __builtin_bit_cast(U, __builtin_bit_cast(F, magnitude) + align) - kAlign;
  const U finite = magnitude < kOffset + (1U << 23) ? subnormal : normal;
  const U code = given > 0x7F800000U ? U{} + 0x7FU : finite;
  return code | ((bits >> 24) & 0x80U);
}

}  // namespace wyvern
