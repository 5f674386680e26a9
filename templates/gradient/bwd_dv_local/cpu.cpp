// dv_local of one chunk for every value head of one key head: their products of queries and keys
// are the same.
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"

WYVERN_BLOCK {
  const int64 head = block[0];
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int rows = chunk.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  float* queries = scratch.tile(BT, K);
  float* keys = scratch.tile(K, BT);  // transposed
  float* products = scratch.tile(BT, BT);
  float* attention = scratch.tile(BT, BT);
  float* gradients = scratch.tile(BT, BV);
  float* result = scratch.tile(BT, BV);
  float* gate = scratch.vector(BT);
  float* query_scale = scratch.vector(BT);
  float* key_scale = scratch.vector(BT);
  constexpr int64 kRow = row_stride(BT), kKeyRow = row_stride(K), kValueRow = row_stride(BV);

  const int64 key_at = (chunk.token * H + head) * K;
  load_tile(q + key_at, int64{H} * K, rows, K, queries, kKeyRow);
  transpose<true>(k + key_at, int64{H} * K, rows, K, keys, kRow);
  multiply<Layout::rows, Lower::c>(rows, rows, K, queries, kKeyRow, keys, kRow, products, kRow);
  for (int r = 0; r < rows; r += kLanes) store(query_scale + r, splat(1.0F));
  if constexpr (QK_L2NORM) {
    load_column(q_rstd + chunk.token * H + head, H, rows, query_scale);
    load_column(k_rstd + chunk.token * H + head, H, rows, key_scale);
  }
  for (int64 hv = head * (HV / H); hv < (head + 1) * (HV / H); ++hv) {
    const int64 at = chunk.token * HV + hv;
    load_gates<SCALAR_GATE>(G + at, HV, rows, gate);
    decay_lower<0, QK_L2NORM>(products, kRow, rows, gate, query_scale, key_scale, attention);
    for (int c = 0; c < V; c += BV) {
      const int columns = V - c < BV ? V - c : BV;
      load_tile(dO + at * V + c, int64{HV} * V, rows, columns, gradients, kValueRow);
      multiply<Layout::columns, Lower::a_transposed>(rows, columns, rows, attention, kRow,
                                                     gradients, kValueRow, result, kValueRow);
      store_tile(result, kValueRow, rows, columns, dv_local + at * V + c, int64{HV} * V, e.scale);
    }
  }
}
