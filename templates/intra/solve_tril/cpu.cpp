// Tinv = (I + A)^-1 of one chunk and value head.
#include "device/cpu/chunk.hpp"
#include "device/cpu/inverse.hpp"

/// dst = -A below the diagonal, 0 elsewhere; nothing else of A is looked at.
static void load_negated(const float* A, int rows, float* dst, int64 ld) {
  const i32 lanes = lane_numbers();
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < BT; c += kLanes) {
      const f32 v = load(A + r * (int64{HV} * BT) + c);
      store(dst + r * ld + c, lanes < r - c ? -v : f32{});
    }
  clear_rows(dst, ld, rows, round_up(rows, kSolveBlock), BT);
}

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 at = (chunk.token * HV + block[0]) * BT;

  Scratch scratch(memory);
  float* n = scratch.tile(BT, BT);
  float* x = scratch.tile(BT, BT);
  float* product_ = scratch.tile(kSolveBlock, BT);
  constexpr int64 kRow = row_stride(BT);

  load_negated(A + at, chunk.rows, n, kRow);
  if (chunk.rows < BT) clear_rows(x, kRow, 0, chunk.rows, BT);
  invert_unit_lower(n, kRow, chunk.rows, x, product_);
  store_tile(x, kRow, chunk.rows, BT, Tinv + at, int64{HV} * BT);
}
