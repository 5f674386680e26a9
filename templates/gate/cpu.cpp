// The gate over ROWS tokens, all heads side by side in vectors.
#include "common/cpu/gate.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void*) {
  const auto* g = static_cast<const G_DTYPE*>(a[0]);
  const auto* A_log = static_cast<const float*>(a[1]);
  const auto* dt_bias = static_cast<const float*>(a[2]);
  auto* g_log = static_cast<float*>(a[3]);
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < e->B * e->T ? first + ROWS : e->B * e->T;
  for_heads(HV, [&](int head, int count) {
    const HeadGate gate = load_gate<HAS_DT_BIAS>(A_log, dt_bias, head, count);
    for (int64 token = first; token < end; ++token) {
      const int64 at = token * HV + head;
      store_heads(g_log + at, apply(gate, load_heads(g + at, count)), count);
    }
  });
}
