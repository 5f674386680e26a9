// The backward pass of the gate over one chunk, all heads side by side in vectors.
#include "common/cpu/gate.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void*) {
  const auto* g = static_cast<const G_DTYPE*>(a[0]);
  const auto* A_log = static_cast<const float*>(a[1]);
  const auto* dt_bias = static_cast<const float*>(a[2]);
  const auto* dg_log = static_cast<const float*>(a[3]);
  auto* dg_raw = static_cast<G_DTYPE*>(a[6]);
  auto* dA_part = static_cast<float*>(a[7]);
  auto* dbias_part = static_cast<float*>(a[8]);
  const Chunk chunk = find_chunk<VARLEN>(block[0], BT, *e, static_cast<const int32*>(a[4]),
                                         static_cast<const int32*>(a[5]));
  for_heads(HV, [&](int head, int count) {
    const int64 start = chunk.token * HV + head;
    const GateColumns gate{exp(load_heads(A_log + head, count)),
                           HAS_DT_BIAS ? load_heads(dt_bias + head, count) : f32{}};
    const auto gradient = [&](int r) { return load_heads(dg_log + start + int64{r} * HV, count); };
    const GateSlopes sums = gate_backward<false>(g + start, dg_raw + start, HV, chunk.rows, count,
                                                 gate, 0.0F, gradient);
    store_heads(dA_part + block[0] * HV + head, sums.by_A_log, count);
    if constexpr (HAS_DT_BIAS) store_heads(dbias_part + block[0] * HV + head, sums.by_x, count);
  });
}
