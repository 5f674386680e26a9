// What a block of solve_tril keeps in scratch.
#pragma once

#include "device/cpu/inverse_layout.hpp"

namespace wyvern::solve_tril {

template <class S>
struct ScratchLayout {
  cpu::TilePlace n, x, block_row;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    n = at.tile(s.BT, s.BT);
    x = at.tile(s.BT, s.BT);
    block_row = at.tile(cpu::kSolveBlock, s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::solve_tril
