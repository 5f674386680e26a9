// dv_local of one chunk and value head, BV columns at a time.
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"

/// Rows of a product that starts at the diagonal: what is left of it is zero.
constexpr int kStrip = 16;

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 at = chunk.token * HV + block[0];
  const int rows = chunk.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  float* attention = scratch.tile(BT, BT);
  float* gradient = scratch.tile(BT, BV);
  float* result = scratch.tile(BT, BV);
  constexpr int64 kRow = row_stride(BT), kValueRow = row_stride(BV);

  load_tile(Aqk + at * BT, int64{HV} * BT, rows, BT, attention, kRow);
  for (int c = 0; c < V; c += BV) {
    const int columns = V - c < BV ? V - c : BV;
    load_tile(dO + at * V + c, int64{HV} * V, rows, columns, gradient, kValueRow);
    for (int s = 0; s < rows; s += kStrip)
      multiply<Layout::columns>(rows - s < kStrip ? rows - s : kStrip, columns, rows - s,
                                attention + s * kRow + s, kRow, gradient + s * kValueRow, kValueRow,
                                result + s * kValueRow, kValueRow);
    store_tile(result, kValueRow, rows, columns, dv_local + at * V + c, int64{HV} * V, e.scale);
  }
}
