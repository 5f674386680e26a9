// Element types and launch sizes of kernels on every device.
#pragma once

#include "device/extents.hpp"
#include "include/wyvern/element.hpp"

namespace wyvern {

using int32 = int;
using int64 = long long;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint64 = unsigned long long;

/// Storage formats: 16 bits that only the conversions of this folder interpret.
struct alignas(2) bf16 {
  uint16 bits;
};
struct alignas(2) fp16 {
  uint16 bits;
};
using fp32 = float;
/// The same of 8 bits.
struct float8_e4m3 {
  unsigned char bits;
};
struct float8_e5m2 {
  unsigned char bits;
};
/// False is 0.
using boolean = unsigned char;

namespace detail {
template <DType type>
struct ElementOf;
template <>
struct ElementOf<DType::fp32> {
  using Type = fp32;
};
template <>
struct ElementOf<DType::fp16> {
  using Type = fp16;
};
template <>
struct ElementOf<DType::bf16> {
  using Type = bf16;
};
template <>
struct ElementOf<DType::int32> {
  using Type = int32;
};
template <>
struct ElementOf<DType::int64> {
  using Type = decltype(Extents::T);
};
template <>
struct ElementOf<DType::boolean> {
  using Type = boolean;
};
template <>
struct ElementOf<DType::float8_e4m3> {
  using Type = float8_e4m3;
};
template <>
struct ElementOf<DType::float8_e5m2> {
  using Type = float8_e5m2;
};
}  // namespace detail

/// The C++ type of an element type.
template <DType type>
using Element = typename detail::ElementOf<type>::Type;

}  // namespace wyvern
