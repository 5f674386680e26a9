// BV columns of a state in scratch, from and to the layout of the caller's states.
#pragma once

#include "device/cpu/tile.hpp"

namespace wyvern::cpu {

/// Loads BV columns of a caller's state from where they start.
template <class T>
static void load_state(const T* from, int columns, float* state) {
  if constexpr (STATE_V_FIRST)
    transpose<true>(from, K, columns, K, state, row_stride(BV));
  else
    load_tile(from, V, K, columns, state, row_stride(BV));
}

static void store_state(const float* state, int columns, float* to) {
  if constexpr (STATE_V_FIRST)
    transpose<false>(state, row_stride(BV), K, columns, to, K);
  else
    store_tile(state, row_stride(BV), K, columns, to, V);
}

/// Offset of the block's columns in a caller's state of sequence n.
static int64 state_start(int64 n, int64 hv, int first_column) {
  return (n * HV + hv) * K * V + (STATE_V_FIRST ? int64{first_column} * K : first_column);
}

}  // namespace wyvern::cpu
