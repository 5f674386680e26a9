// The rows of the steps of ROWS tokens: a token's row at its first or last step, zeros at the
// others.
#include "device/cpu/tile.hpp"

constexpr int kRow = H * K;
constexpr int kStep = FIRST_STEP ? 0 : STEPS - 1;

WYVERN_BLOCK {
  const int64 first = block[0] * ROWS, total = e.B * e.T;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 row = first * STEPS; row < end * STEPS; ++row) {
    const DTYPE* from = x + row / STEPS * x_stride;
    DTYPE* to = x_steps + row * kRow;
    const bool moved = row % STEPS == kStep;
    int c = 0;
    for (; c + kLanes <= kRow; c += kLanes) store(to + c, moved ? load(from + c) : f32{});
    if (c < kRow) store_part(to + c, moved ? load_part(from + c, kRow - c) : f32{}, kRow - c);
  }
}
