// The float8 types, in plain arithmetic: sm_80 has no instruction for them.
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
template <>
WYVERN_DEVICE float8_e4m3 from_float<float8_e4m3>(float x) {
  return {static_cast<unsigned char>(float8_code<DType::float8_e4m3, uint32>(x))};
}
template <>
WYVERN_DEVICE float8_e5m2 from_float<float8_e5m2>(float x) {
  return {static_cast<unsigned char>(float8_code<DType::float8_e5m2, uint32>(x))};
}

}  // namespace wyvern::cuda
