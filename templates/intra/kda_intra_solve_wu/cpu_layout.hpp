// What a block of kda_intra_solve_wu keeps in scratch.
#pragma once

#include "device/cpu/inverse_layout.hpp"
#include "device/cpu/kda_layout.hpp"

namespace wyvern::kda_intra_solve_wu {

template <class S>
struct ScratchLayout {
  cpu::IntraProductsLayout<S> intra;
  cpu::TilePlace n, inverse, block_row;
  cpu::TilePlace key_factor, value_factor;  // in one place
  cpu::TilePlace w, u;                      // in one place
  cpu::VectorPlace rate, scale;
  long bytes;

  constexpr explicit ScratchLayout(const S& s) : intra(s) {
    cpu::LayoutBuilder at{intra.bytes};
    n = at.tile(s.BT, s.BT);
    inverse = at.tile(s.BT, s.BT);
    block_row = at.tile(cpu::kSolveBlock, s.BT);
    cpu::LayoutBuilder keys = at;
    key_factor = keys.tile(s.BT, s.K);
    value_factor = at.tile(s.BT, s.BV);
    at.cover(keys);
    keys = at;
    w = keys.tile(s.BT, s.K);
    u = at.tile(s.BT, s.BV);
    at.cover(keys);
    rate = at.vector(s.BT);
    scale = at.vector(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_intra_solve_wu
