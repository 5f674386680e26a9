// Reverse sums of the gradient of G over one chunk: of all heads of a scalar gate, or of one head's
// keys.
#include "device/cpu/gate.hpp"

constexpr int kColumns = VECTOR_GATE ? GATE_K : GATE_HEADS;

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[0], BT, e, seq_offsets, chunk_index);
  for_heads(kColumns, [&](int column, int count) {
    const int64 start = chunk.token * GATE_HEADS + block[1] * kColumns + column;
    LogDecayGradient gradient{dG + start, G + start, GATE_HEADS, count, e.gate_floor};
    for (int r = chunk.rows - 1; r >= 0; --r)
      store_heads(dg + start + r * int64{GATE_HEADS}, gradient(r), count);
  });
}
