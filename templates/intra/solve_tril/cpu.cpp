// Tinv = (I + A)^-1 of one chunk and value head.
#include "device/cpu/chunk.hpp"
#include "device/cpu/inverse.hpp"
#include "intra/solve_tril/cpu_layout.hpp"

/// dst = -A below the diagonal, 0 elsewhere; no other element of A is read.
static void load_negated(const float* A, const Extents& e, int rows, Tile<BT> dst) {
  const i32 lanes = lane_numbers();
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < BT; c += kLanes) {
      const f32 v = load(A + r * (int64{e.HV} * BT) + c);
      store(dst.row(r) + c, lanes < r - c ? -v : f32{});
    }
  clear_rows(dst, rows, round_up(rows, kSolveBlock), BT);
}

constexpr solve_tril::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 at = (chunk.token * e.HV + block[0]) * BT;

  const auto n = tile_at<kScratch.n>(memory);
  const auto x = tile_at<kScratch.x>(memory);
  const auto block_row = tile_at<kScratch.block_row>(memory);

  load_negated(A + at, e, chunk.rows, n);
  if (chunk.rows < BT) clear_rows(x, 0, chunk.rows, BT);
  invert_unit_lower(n, chunk.rows, x, block_row);
  store_tile(x, chunk.rows, BT, Tinv + at, int64{e.HV} * BT);
}
