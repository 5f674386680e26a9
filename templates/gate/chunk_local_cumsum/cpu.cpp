// Running sum of the log decay over one chunk, all heads side by side in vectors.
#include "device/cpu/gate.hpp"

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[0], BT, e, seq_offsets, chunk_index);
  const f32 floor = splat(e.gate_floor);
  // Row by row, as a vector gate's rows are long: the sum so far is the row before.
  for (int r = 0; r < chunk.rows; ++r)
    for_heads(GATE_HEADS, [&](int head, int count) {
      const int64 at = (chunk.token + r) * GATE_HEADS + head;
      const f32 term = at_least(load_heads(g + (chunk.token + r) * g_stride + head, count), floor);
      store_heads(G + at, r == 0 ? term : term + load_heads(G + at - GATE_HEADS, count), count);
    });
}
