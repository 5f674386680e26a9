// What a block of wy_dqkg keeps in scratch.
#pragma once

#include "device/chunk_tokens.hpp"
#include "device/cpu/backward_layout.hpp"

namespace wyvern::wy_dqkg {

template <class S>
struct ScratchLayout {
  cpu::TilePlace d_out, x, values_t, inverse, products, N, M, queries, keys, state_t, gradient_t,
      result_q, result_k, y;
  cpu::DecayLayout decay;
  cpu::VectorPlace rate, query_scale, key_scale, diagonal, query_factor, y_factor, ones, gate,
      of_keys, of_beta, row_sums, pairs_P, pairs_N;
  long bytes;

  constexpr explicit ScratchLayout(const S& s, cpu::LayoutBuilder at = {}) {
    d_out = at.tile(s.BT, s.V);  // dU first
    x = at.tile(s.BT, s.V);
    values_t = at.tile(s.V, s.BT);
    inverse = at.tile(s.BT, s.BT);  // then P
    products = at.tile(s.BT, s.BT);
    N = at.tile(s.BT, s.BT);
    M = at.tile(s.BT, s.BT);
    queries = at.tile(s.BT, s.BK);
    keys = at.tile(s.BT, s.BK);
    state_t = at.tile(s.V, s.BK);
    gradient_t = at.tile(s.V, s.BK);
    result_q = at.tile(s.BT, s.BK);
    result_k = at.tile(s.BT, s.BK);
    y = at.tile(s.BT, s.BK);  // exp(G) Tinv^T dW + N K
    decay = at.part<cpu::DecayLayout>(s.BT);
    rate = at.vector(s.BT);
    query_scale = at.vector(s.BT);
    key_scale = at.vector(s.BT);
    diagonal = at.vector(s.BT);
    query_factor = at.vector(s.BT);
    y_factor = at.vector(s.BT);
    ones = at.vector(s.BT);
    gate = at.vector(s.BT);
    of_keys = at.vector(s.BT);
    of_beta = at.vector(s.BT);
    row_sums = at.vector(s.BT);
    pairs_P = at.vector(s.BT * earlier_steps(s));
    pairs_N = at.vector(s.BT * earlier_steps(s));
    bytes = at.bytes;
  }
};

}  // namespace wyvern::wy_dqkg
