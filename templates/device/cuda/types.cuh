// Element types and launch sizes of CUDA templates; the generator puts this before everything else.
#pragma once

#include "device/extents.hpp"

using wyvern::Extents;

using int64 = long long;
using int32 = int;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint64 = unsigned long long;

/// Storage formats: 16 bits that only the conversions of this folder look into.
struct alignas(2) bf16 {
  uint16 bits;
};
struct alignas(2) fp16 {
  uint16 bits;
};
using fp32 = float;

/// How fp32 matrix products are computed, least accurate first.
enum class Precision { tf32, tf32x3, ieee };
