// The boundaries of sequences in steps. Numbers outside [0, T] are clamped first, so that a
// bad cu_seqlens cannot overflow.
#include "device/cuda/tile.cuh"

constexpr int kThreads = num_warps * 32;

WYVERN_KERNEL(kThreads, 0) {
  const int64 n = int64{block_index()} * kThreads + thread_index();
  if (n > e.N) return;
  const int64 given = static_cast<int64>(cu_seqlens[n]);
  const int64 inside = given < 0 ? 0 : given > e.T ? e.T : given;
  cu_seqlens_steps[n] = static_cast<SEQLENS_DTYPE>(inside * STEPS);
}
