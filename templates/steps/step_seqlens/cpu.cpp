// The boundaries of sequences in steps, ROWS of them, clamped to [0, T] first, so that a bad
// cu_seqlens cannot overflow.
#include "device/cpu/vector.hpp"

WYVERN_BLOCK {
  const int64 first = block[0] * ROWS;
  for (int64 n = first; n < first + ROWS && n <= e.N; ++n) {
    const int64 given = cu_seqlens[n];
    const int64 inside = given < 0 ? 0 : given > e.T ? e.T : given;
    cu_seqlens_steps[n] = static_cast<SEQLENS_DTYPE>(inside * STEPS);
  }
}
