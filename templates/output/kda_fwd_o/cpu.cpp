// O of one chunk and value head, BV columns at a time.
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"

WYVERN_BLOCK {
  const int64 hv = block[0], slot = block[1];
  const Chunk chunk = find_chunk<VARLEN>(slot, BT, e, seq_offsets, chunk_index);
  const int64 at = chunk.token * HV + hv;
  const int rows = chunk.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  float* queries = scratch.tile(BT, K);
  float* attention = scratch.tile(BT, BT);
  float* state = scratch.tile(K > BT ? K : BT, BV);  // then V'
  float* result = scratch.tile(BT, BV);
  float* ones = scratch.vector(BT);
  constexpr int64 kRow = row_stride(BT), kKeyRow = row_stride(K), kValueRow = row_stride(BV);

  for (int r = 0; r < BT; r += kLanes) store(ones + r, splat(1.0F));
  load_tile(qg + at * K, int64{HV} * K, rows, K, queries, kKeyRow);
  load_tile(Aqk + at * BT, int64{HV} * BT, rows, BT, attention, kRow);
  for (int c = 0; c < V; c += BV) {
    const int columns = V - c < BV ? V - c : BV;
    load_tile(h + (slot * HV + hv) * K * V + c, V, K, columns, state, kValueRow);
    multiply(rows, columns, K, queries, kKeyRow, state, kValueRow, result, kValueRow);
    load_tile(v_new + at * V + c, int64{HV} * V, rows, columns, state, kValueRow);
    multiply_add<Layout::rows, Lower::a>(rows, columns, rows, attention, kRow, state, kValueRow,
                                         result, kValueRow, ones);
    store_tile(result, kValueRow, rows, columns, o + at * V + c, int64{HV} * V, e.scale);
  }
}
