// Reverse sums of the gradient of G over one chunk: of all heads of a scalar gate, or of one head's
// keys.
#include "common/cpu/gate.hpp"

constexpr int kColumns = VECTOR_GATE ? GATE_K : GATE_HEADS;

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void*) {
  const auto* dG = static_cast<const float*>(a[0]);
  const auto* G = static_cast<const float*>(a[1]);
  auto* dg = static_cast<DG_DTYPE*>(a[4]);
  const Chunk chunk = find_chunk<VARLEN>(block[0], BT, *e, static_cast<const int32*>(a[2]),
                                         static_cast<const int32*>(a[3]));
  for_heads(kColumns, [&](int column, int count) {
    const int64 start = chunk.token * GATE_HEADS + block[1] * kColumns + column;
    LogDecayGradient gradient{dG + start, G + start, GATE_HEADS, count, e->gate_floor};
    for (int r = chunk.rows - 1; r >= 0; --r)
      store_heads(dg + start + r * int64{GATE_HEADS}, gradient(r), count);
  });
}
