// Rows of tokens as rows of steps: a token's row at one of its steps, zeros at the others.
#include "device/cuda/tile.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kRow = H * K;
constexpr int kVector = vector_bytes<DTYPE>(kRow) / static_cast<int>(sizeof(DTYPE));
constexpr int kPerRow = kRow / kVector;
constexpr int kStep = FIRST_STEP ? 0 : STEPS - 1;

WYVERN_KERNEL(kThreads, 0) {
  const int64 i = int64{block_index()} * kThreads + thread_index();
  const int64 row = i / kPerRow;
  if (row >= e.B * e.T * STEPS) return;
  Vector<DTYPE, kVector> moved = {};
  if (row % STEPS == kStep)
    moved = load<kVector>(x + row / STEPS * x_stride + i % kPerRow * kVector);
  store_vector(x_steps + i * kVector, moved);
}
