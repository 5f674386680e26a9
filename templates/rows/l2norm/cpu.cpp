// y = x / sqrt(sum(x^2) + 1e-6), for ROWS rows of K.
#include "device/cpu/math.hpp"

WYVERN_BLOCK {
  constexpr int kWhole = K / kLanes * kLanes;
  const int64 total = e.B * e.T * e.H;
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 row = first; row < end; ++row) {
    const DTYPE* from = x + row / e.H * x_stride + row % e.H * K;
    DTYPE* to = y + row * K;
    f32 squares{};
    for (int c = 0; c < kWhole; c += kLanes) {
      const f32 v = load(from + c);
      squares += v * v;
    }
    f32 rest{};
    if constexpr (kWhole < K) {
      rest = load_part(from + kWhole, K - kWhole);
      squares += rest * rest;
    }
    const float factor = 1.0F / __builtin_sqrtf(sum(squares) + 1e-6F);
    for (int c = 0; c < kWhole; c += kLanes) store(to + c, load(from + c) * factor);
    if constexpr (kWhole < K) store_part(to + kWhole, rest * factor, K - kWhole);
  }
}
