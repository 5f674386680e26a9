// The gate, element by element.
#include "device/cuda/gate.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kPerThread = 4;

WYVERN_KERNEL(kThreads, 0) {
  const int64 count = e.B * e.T * HV;
  const int64 first = int64{block_index()} * (kThreads * kPerThread) + thread_index();
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64 i = first + j * kThreads;
    if (i >= count) return;
    const int head = static_cast<int>(i % HV);
    const float bias = HAS_DT_BIAS ? dt_bias[head] : 0.0f;
    g_log[i] = log_decay(to_float(g[i / HV * g_stride + head]) + bias, A_log[head]);
  }
}
