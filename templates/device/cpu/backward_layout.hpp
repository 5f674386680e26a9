// Scratch of ChunkBackward.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::cpu {

/// Of ChunkBackward::Decay, for chunks of `rows` rows.
struct DecayLayout {
  VectorPlace G, since_start, until_end;
  long bytes = 0;

  constexpr DecayLayout() = default;
  constexpr explicit DecayLayout(long rows, LayoutBuilder at = {}) {
    G = at.vector(rows);
    since_start = at.vector(rows);
    until_end = at.vector(rows);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::cpu
