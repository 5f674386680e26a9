// The states that enter segments.
#include "common/cpu/combine.hpp"
#include "common/cpu/state.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void* memory) {
  const auto* initial_state = static_cast<const STATE_DTYPE*>(a[2]);
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
  combine_segments<false>(static_cast<const float*>(a[0]), static_cast<const float*>(a[1]),
                          static_cast<const int32*>(a[3]), static_cast<float*>(a[4]), *e, n, hv,
                          first_column, state, next, m, ones);
}
