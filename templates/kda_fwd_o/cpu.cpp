// O of one chunk and value head, BV columns at a time.
#include "common/cpu/chunk.hpp"
#include "common/cpu/product.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void* memory) {
  const auto* qg = static_cast<const DTYPE*>(a[0]);
  const auto* Aqk = static_cast<const float*>(a[1]);
  const auto* v_new = static_cast<const DTYPE*>(a[2]);
  const auto* h = static_cast<const DTYPE*>(a[3]);
  auto* o = static_cast<DTYPE*>(a[6]);
  const int64 hv = block[0], slot = block[1];
  const Chunk chunk = find_chunk<VARLEN>(slot, BT, *e, static_cast<const int32*>(a[4]),
                                         static_cast<const int32*>(a[5]));
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
    store_tile(result, kValueRow, rows, columns, o + at * V + c, int64{HV} * V, e->scale);
  }
}
