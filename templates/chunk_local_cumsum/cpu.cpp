// Running sum of the log decay over one chunk, all heads side by side in vectors.
#include "common/cpu/gate.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void*) {
  const auto* g = static_cast<const G_DTYPE*>(a[0]);
  auto* G = static_cast<float*>(a[3]);
  const Chunk chunk = find_chunk<VARLEN>(block[0], BT, *e, static_cast<const int32*>(a[1]),
                                         static_cast<const int32*>(a[2]));
  const f32 floor = splat(e->gate_floor);
  // Row by row, as a vector gate's rows are long: the sum so far is the row before.
  for (int r = 0; r < chunk.rows; ++r)
    for_heads(GATE_HEADS, [&](int head, int count) {
      const int64 at = (chunk.token + r) * GATE_HEADS + head;
      const f32 term = at_least(load_heads(g + at, count), floor);
      store_heads(G + at, r == 0 ? term : term + load_heads(G + at - GATE_HEADS, count), count);
    });
}
