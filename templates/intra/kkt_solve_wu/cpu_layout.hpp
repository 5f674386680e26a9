// What a block of kkt_solve_wu keeps in scratch.
#pragma once

#include "device/cpu/inverse_layout.hpp"

namespace wyvern::kkt_solve_wu {

template <class S>
struct ScratchLayout {
  cpu::TilePlace keys, keys_t, products, n, inverse, block_row, values, w, u;
  cpu::VectorPlace decay, rate, factor, key_scale;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    keys = at.tile(s.BT, s.K);
    keys_t = at.tile(s.K, s.BT);
    products = at.tile(s.BT, s.BT);
    n = at.tile(s.BT, s.BT);
    inverse = at.tile(s.BT, s.BT);
    block_row = at.tile(cpu::kSolveBlock, s.BT);
    values = at.tile(s.BT, s.BV);
    cpu::LayoutBuilder other = at;  // W and U follow each other in one place
    w = other.tile(s.BT, s.K);
    u = at.tile(s.BT, s.BV);
    at.cover(other);
    decay = at.vector(s.BT);
    rate = at.vector(s.BT);
    factor = at.vector(s.BT);
    key_scale = at.vector(s.BT);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kkt_solve_wu
