// What a block of wy_bwd keeps in scratch.
#pragma once

#include "device/chunk_tokens.hpp"
#include "device/cpu/backward_layout.hpp"

namespace wyvern::wy_bwd {

template <class S>
struct ScratchLayout {
  cpu::TilePlace d_values, x, values_t, inverse, products, N, M, keys, d_w, y, result_k;
  cpu::DecayLayout decay;
  cpu::VectorPlace rate, key_scale, factor, gate, of_keys, of_beta, pairs;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    d_values = at.tile(s.BT, s.V);
    x = at.tile(s.BT, s.V);
    values_t = at.tile(s.V, s.BT);
    inverse = at.tile(s.BT, s.BT);
    products = at.tile(s.BT, s.BT);
    N = at.tile(s.BT, s.BT);
    M = at.tile(s.BT, s.BT);
    keys = at.tile(s.BT, s.BK);
    d_w = at.tile(s.BT, s.BK);  // then dk_qk
    y = at.tile(s.BT, s.BK);
    result_k = at.tile(s.BT, s.BK);
    decay = at.part<cpu::DecayLayout>(s.BT);
    rate = at.vector(s.BT);
    key_scale = at.vector(s.BT);
    factor = at.vector(s.BT);
    gate = at.vector(s.BT);
    of_keys = at.vector(s.BT);
    of_beta = at.vector(s.BT);
    pairs = at.vector(s.BT * earlier_steps(s));
    bytes = at.bytes;
  }
};

}  // namespace wyvern::wy_bwd
