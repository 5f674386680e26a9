// The rows of ROWS tokens from rows of their steps: each token's first or last step.
#include "device/cpu/tile.hpp"

constexpr int kRow = H * K;
constexpr int kStep = FIRST_STEP ? 0 : STEPS - 1;

WYVERN_BLOCK {
  const int64 first = block[0] * ROWS, total = e.B * e.T;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 token = first; token < end; ++token) {
    const DTYPE* from = x_steps + (token * STEPS + kStep) * kRow;
    DTYPE* to = x + token * kRow;
    int c = 0;
    for (; c + kLanes <= kRow; c += kLanes) store(to + c, load(from + c));
    if (c < kRow) store_part(to + c, load_part(from + c, kRow - c), kRow - c);
  }
}
