// The tables of a packed batch, in one call.
#include "device/cpu/vector.hpp"

WYVERN_BLOCK {
  int64 end = 0;
  for (int64 n = 0; n <= e.N; ++n) {
    const int64 given = cu_seqlens[n];
    const int64 inside = given < e.T ? given : e.T;
    end = inside > end ? inside : end;
    seq_offsets[n] = static_cast<int32>(end);
  }
  int32 slot = 0;
  for (int64 n = 0; n < e.N; ++n) {
    chunk_offsets[n] = slot;
    const int32 chunks = (seq_offsets[n + 1] - seq_offsets[n] + BT - 1) / BT;
    for (int32 c = 0; c < chunks; ++c, ++slot) {
      chunk_index[2 * slot] = static_cast<int32>(n);
      chunk_index[2 * slot + 1] = c;
    }
  }
  chunk_offsets[e.N] = slot;
  for (int64 unused = slot; unused < e.NT; ++unused)
    chunk_index[2 * unused] = chunk_index[2 * unused + 1] = -1;
}
