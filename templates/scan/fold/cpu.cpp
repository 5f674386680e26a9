// The states that enter ranges in the order of tokens, S <- M S + R; with BACKWARDS the gradients
// of those that leave them, from the last range on, by M transposed. All in fp32.
#include "device/cpu/product.hpp"
#include "scan/fold/cpu_layout.hpp"

constexpr fold::ScratchLayout<Spec> kScratch{Spec{}};

/// Whether M is 0: no sequence continues through the range, and numbers that are not finite do not
/// cross it.
static bool is_zero(Tile<K> M) {
  bool zero = true;
  for (int r = 0; r < K; ++r)
    for (int c = 0; c < K; ++c) zero &= M.row(r)[c] == 0;
  return zero;
}

WYVERN_BLOCK {
  const int first = static_cast<int>(block[0]) * BV;
  const int columns = V - first < BV ? V - first : BV;
  const int64 hv = block[1];

  Tile<BV> state = tile_at<kScratch.state>(memory);
  Tile<BV> next = tile_at<kScratch.next>(memory);
  const Tile<K> M = tile_at<kScratch.M>(memory);
  float* const ones = vector_at<kScratch.ones>(memory);
  for (int i = 0; i < K + 8; ++i) ones[i] = 1.0F;
  clear_rows(state, 0, K, columns);
  for (int64 step = 0; step < e.N; ++step) {
    // A wrong order gives wrong numbers, but no stray access.
    const int64 given = order[BACKWARDS ? e.N - 1 - step : step];
    const int64 range = given < 0 ? 0 : given < e.N ? given : e.N - 1;
    const int64 at = range * e.HV + hv;
    store_tile(state, K, columns, range_states + at * K * V + first, V);
    if (step == e.N - 1) break;
    const float* const summary = summaries + at * K * SUMMARY_COLUMNS;
    load_tile(summary + first, SUMMARY_COLUMNS, K, columns, next);
    if constexpr (TRANSITION) {
      if (step > 0) {  // before it the state is 0
        load_tile(summary + V, SUMMARY_COLUMNS, K, K, M);
        if (!is_zero(M))
          multiply_add<BACKWARDS ? Layout::columns : Layout::rows>(K, columns, K, M, state, next,
                                                                   ones);
      }
    }
    const Tile<BV> done = state;
    state = next;
    next = done;
  }
}
