// Rows of steps as rows of tokens: that of one of a token's steps.
#include "device/cuda/tile.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kRow = H * K;
constexpr int kVector = vector_bytes<DTYPE>(kRow) / static_cast<int>(sizeof(DTYPE));
constexpr int kPerRow = kRow / kVector;
constexpr int kStep = FIRST_STEP ? 0 : STEPS - 1;

WYVERN_KERNEL(kThreads, 0) {
  const int64 i = int64{block_index()} * kThreads + thread_index();
  const int64 row = i / kPerRow;
  if (row >= e.B * e.T) return;
  const int64 from = (row * STEPS + kStep) * kPerRow + i % kPerRow;
  store_vector(x + i * kVector, load<kVector>(x_steps + from * kVector));
}
