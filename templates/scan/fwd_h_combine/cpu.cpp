// The states that enter segments.
#include "device/cpu/combine.hpp"
#include "device/cpu/state.hpp"

WYVERN_BLOCK {
  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1], n = block[2];

  Scratch scratch(memory);
  float* state = scratch.tile(K, BV);
  float* next = scratch.tile(K, BV);
  float* m = scratch.tile(K, K);
  float* ones = scratch.vector(round_up(K, kTileRows));
  if constexpr (INITIAL_STATE)
    load_state(initial_state + state_start(n, hv, first_column), columns, state);
  else
    clear_rows(state, kValueRow, 0, K, columns);
  combine_segments<false>(segment_M, segment_R, seq_offsets, segment_state, e, n, hv, first_column,
                          state, next, m, ones);
}
