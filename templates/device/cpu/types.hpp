// The prelude that the generator puts before every CPU template.
#pragma once

#include "device/types.hpp"

namespace wyvern::cpu {}

/// Begins the definition of a block function: one call is one block of the grid, on one thread. It
/// has the tensors and sizes that WYVERN_PARAMETERS declares, `block`, which of the grid's blocks
/// this is, and `memory`, scratch aligned to 64 bytes. The text before it is the entry point.
#define WYVERN_BLOCK                                                                           \
  static void run_block(WYVERN_PARAMETERS, const wyvern::int64* block, void* memory);          \
  extern "C" void wyvern_kernel(void* const* tensors, const wyvern::Extents* extents,          \
                                const wyvern::int64* block, void* memory) {                    \
    run_block(WYVERN_UNPACK(tensors, extents), block, memory);                                 \
  }                                                                                            \
  static inline void run_block(WYVERN_PARAMETERS, [[maybe_unused]] const wyvern::int64* block, \
                               [[maybe_unused]] void* memory)
