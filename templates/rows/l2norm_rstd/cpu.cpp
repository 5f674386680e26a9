// rstd = 1 / sqrt(sum(x^2) + 1e-6), for ROWS rows of K.
#include "device/cpu/math.hpp"

WYVERN_BLOCK {
  constexpr int kWhole = K / kLanes * kLanes;
  const int64 total = e.B * e.T * e.H;
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 row = first; row < end; ++row) {
    const DTYPE* from = x + row / e.H * x_stride + row % e.H * K;
    f32 squares{};
    for (int c = 0; c < kWhole; c += kLanes) {
      const f32 v = load(from + c);
      squares += v * v;
    }
    if constexpr (kWhole < K) {
      const f32 rest = load_part(from + kWhole, K - kWhole);
      squares += rest * rest;
    }
    rstd[row] = 1.0F / __builtin_sqrtf(sum(squares) + 1e-6F);
  }
}
