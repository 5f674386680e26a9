// The float8 types: by the instructions that GPUs have from sm_89 on, else in plain arithmetic.
#pragma once

#include "device/cuda/ptx.cuh"
#include "device/float8.hpp"

namespace wyvern::cuda {

WYVERN_DEVICE float to_float(float8_e4m3 x) {
  return float8_value<DType::float8_e4m3, float>(uint32{x.bits});
}
WYVERN_DEVICE float to_float(float8_e5m2 x) {
  return float8_value<DType::float8_e5m2, float>(uint32{x.bits});
}
/// Two codes side by side, `low` in the lower half; rounded and clamped as float8_code() does.
template <class T>
WYVERN_DEVICE uint16 pack_float8(float low, float high);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <>
WYVERN_DEVICE uint16 pack_float8<float8_e4m3>(float low, float high) {
  uint16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
template <>
WYVERN_DEVICE uint16 pack_float8<float8_e5m2>(float low, float high) {
  uint16 codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
#else
template <DType type>
WYVERN_DEVICE uint16 pack_codes(float low, float high) {
  return static_cast<uint16>(float8_code<type, uint32>(low) | float8_code<type, uint32>(high)
                                                                  << 8U);
}
template <>
WYVERN_DEVICE uint16 pack_float8<float8_e4m3>(float low, float high) {
  return pack_codes<DType::float8_e4m3>(low, high);
}
template <>
WYVERN_DEVICE uint16 pack_float8<float8_e5m2>(float low, float high) {
  return pack_codes<DType::float8_e5m2>(low, high);
}
#endif

template <>
WYVERN_DEVICE float8_e4m3 from_float<float8_e4m3>(float x) {
  return {static_cast<unsigned char>(pack_float8<float8_e4m3>(x, 0.0f))};
}
template <>
WYVERN_DEVICE float8_e5m2 from_float<float8_e5m2>(float x) {
  return {static_cast<unsigned char>(pack_float8<float8_e5m2>(x, 0.0f))};
}

}  // namespace wyvern::cuda
