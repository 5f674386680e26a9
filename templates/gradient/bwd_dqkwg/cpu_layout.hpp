// What a block of bwd_dqkwg keeps in scratch.
#pragma once

#include "device/chunk_tokens.hpp"
#include "device/cpu/backward_layout.hpp"

namespace wyvern::bwd_dqkwg {

template <class S>
struct ScratchLayout {
  cpu::TilePlace d_out, d_values, values_t, products, P, queries, keys, state_t, gradient_t,
      result_q, result_k, result_w;
  cpu::DecayLayout decay;
  cpu::VectorPlace query_scale, key_scale, diagonal, factor, gate, row_sums, pairs;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    d_out = at.tile(s.BT, s.V);
    d_values = at.tile(s.BT, s.V);
    values_t = at.tile(s.V, s.BT);
    products = at.tile(s.BT, s.BT);
    P = at.tile(s.BT, s.BT);
    queries = at.tile(s.BT, s.BK);
    keys = at.tile(s.BT, s.BK);
    state_t = at.tile(s.V, s.BK);
    gradient_t = at.tile(s.V, s.BK);
    result_q = at.tile(s.BT, s.BK);
    result_k = at.tile(s.BT, s.BK);
    result_w = at.tile(s.BT, s.BK);
    decay = at.part<cpu::DecayLayout>(s.BT);
    query_scale = at.vector(s.BT);
    key_scale = at.vector(s.BT);
    diagonal = at.vector(s.BT);
    factor = at.vector(s.BT);
    gate = at.vector(s.BT);
    row_sums = at.vector(s.BT);
    pairs = at.vector(s.BT * earlier_steps(s));
    bytes = at.bytes;
  }
};

}  // namespace wyvern::bwd_dqkwg
