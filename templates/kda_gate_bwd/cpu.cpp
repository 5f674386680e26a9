// The backward pass of the gate per key channel over one chunk of one head.
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
  constexpr int64 kStride = int64{HV} * K;
  const int64 part = block[0] * HV + block[1];
  f32 dA{};
  for_heads(K, [&](int key, int count) {
    const int64 start = chunk.token * kStride + block[1] * K + key;
    const auto gate =
        load_columns<HAS_A_LOG, HAS_DT_BIAS>(A_log, block[1], dt_bias, block[1] * K + key, count);
    const auto gradient = [&](int r) { return load_heads(dg_log + start + r * kStride, count); };
    const GateSlopes sums = gate_backward<LOWER_BOUND>(
        g + start, dg_raw + start, kStride, chunk.rows, count, gate, e->lower_bound, gradient);
    dA += sums.by_A_log;
    if constexpr (HAS_DT_BIAS) store_heads(dbias_part + part * K + key, sums.by_x, count);
  });
  if constexpr (HAS_A_LOG) dA_part[part] = sum(dA);
}
