// Element types and launch sizes of CPU templates; the generator puts this before everything else.
#pragma once

#include "device/extents.hpp"

using wyvern::Extents;

using int64 = long;
using int32 = int;
using uint32 = unsigned int;
using uint16 = unsigned short;

/// Storage formats: 16 bits that only the conversions of this folder look into.
struct bf16 {
  uint16 bits;
};
struct fp16 {
  uint16 bits;
};
using fp32 = float;

/// How fp32 matrix products are computed, least accurate first.
enum class Precision { tf32, tf32x3, ieee };

/// Begins the definition of a block function: one call is one block of the grid, on one thread. It
/// has the tensors and sizes that WYVERN_PARAMETERS declares, `block`, which of the grid's blocks
/// this is, and `memory`, scratch aligned to 64 bytes. What comes before it is the entry point.
#define WYVERN_BLOCK                                                                              \
  static void run_block(WYVERN_PARAMETERS, const int64* block, void* memory);                     \
  extern "C" void wyvern_kernel(void* const* tensors, const Extents* extents, const int64* block, \
                                void* memory) {                                                   \
    run_block(WYVERN_UNPACK(tensors, extents), block, memory);                                    \
  }                                                                                               \
  static inline void run_block(WYVERN_PARAMETERS, [[maybe_unused]] const int64* block,            \
                               [[maybe_unused]] void* memory)
