// Reverse sums of the gradient of G and the backward pass of the gate per key channel over one
// chunk of one head.
#include "common/cpu/gate.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void*) {
  const auto* g = static_cast<const G_DTYPE*>(a[0]);
  const auto* A_log = static_cast<const float*>(a[1]);
  const auto* dt_bias = static_cast<const float*>(a[2]);
  const auto* dG = static_cast<const float*>(a[3]);
  const auto* G = static_cast<const float*>(a[4]);
  auto* dg_raw = static_cast<G_DTYPE*>(a[7]);
  auto* dA_part = static_cast<float*>(a[8]);
  auto* dbias_part = static_cast<float*>(a[9]);
  const Chunk chunk = find_chunk<VARLEN>(block[0], BT, *e, static_cast<const int32*>(a[5]),
                                         static_cast<const int32*>(a[6]));
  constexpr int64 kStride = int64{HV} * K;
  const int64 part = block[0] * HV + block[1];
  f32 dA{};
  for_heads(K, [&](int key, int count) {
    const int64 start = chunk.token * kStride + block[1] * K + key;
    const auto gate =
        load_columns<HAS_A_LOG, HAS_DT_BIAS>(A_log, block[1], dt_bias, block[1] * K + key, count);
    LogDecayGradient gradient{dG + start, G + start, kStride, count, e->gate_floor};
    const GateSlopes sums = gate_backward<LOWER_BOUND>(
        g + start, dg_raw + start, kStride, chunk.rows, count, gate, e->lower_bound, gradient);
    dA += sums.by_A_log;
    if constexpr (HAS_DT_BIAS) store_heads(dbias_part + part * K + key, sums.by_x, count);
  });
  if constexpr (HAS_A_LOG) dA_part[part] = sum(dA);
}
