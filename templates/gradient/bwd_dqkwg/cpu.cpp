// dQ, the part of dK that attention and state make, dW and their part of the gate's gradient, of
// one chunk and value head.
#include "device/cpu/backward.hpp"

WYVERN_BLOCK {
  const int64 hv = block[0], slot = block[1], head = hv / (HV / H);
  const Chunk chunk = find_chunk<VARLEN>(slot, BT, e, seq_offsets, chunk_index);
  const int rows = chunk.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  float* d_out = scratch.tile(BT, V);
  float* d_values = scratch.tile(BT, V);
  float* values_t = scratch.tile(V, BT);
  float* products = scratch.tile(BT, BT);
  float* P = scratch.tile(BT, BT);
  float* queries = scratch.tile(BT, BK);
  float* keys = scratch.tile(BT, BK);
  float* state_t = scratch.tile(V, BK);
  float* gradient_t = scratch.tile(V, BK);
  float* result_q = scratch.tile(BT, BK);
  float* result_k = scratch.tile(BT, BK);
  float* result_w = scratch.tile(BT, BK);
  const Decay decay(scratch);
  float* query_scale = scratch.vector(BT);
  float* key_scale = scratch.vector(BT);
  float* diagonal = scratch.vector(BT);
  float* factor = scratch.vector(BT);
  float* gate = scratch.vector(BT);
  float* row_sums = scratch.vector(BT);

  const int64 at = chunk.token * HV + hv, at_k = chunk.token * H + head;
  decay.load(G + at, rows);
  if constexpr (QK_L2NORM) {
    load_column(q_rstd + at_k, H, rows, query_scale);
    load_column(k_rstd + at_k, H, rows, key_scale);
  }
  load_tile(dO + at * V, int64{HV} * V, rows, V, d_out, kValueRow);
  load_tile(du + at * V, int64{HV} * V, rows, V, d_values, kValueRow);
  transpose<true>(v_new + at * V, int64{HV} * V, rows, V, values_t, kRow);
  attention_gradient(d_out, values_t, decay, e.scale, rows, products, factor, P, diagonal);
  for (int r = 0; r < rows; r += kLanes) {
    store(factor + r, load(decay.since_start + r) * e.scale);
    store(gate + r, f32{});
  }
  float end = 0.0F;
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    const int64 state_at = ((slot * HV + hv) * K + c) * V;
    load_keys(q + at_k * K + c, query_scale, rows, columns, queries);
    load_keys(k + at_k * K + c, key_scale, rows, columns, keys);
    transpose<true>(h + state_at, V, columns, V, state_t, kKeyRow);
    transpose<true>(dh + state_at, V, columns, V, gradient_t, kKeyRow);
    multiply(rows, columns, V, d_values, kValueRow, state_t, kKeyRow, result_w, kKeyRow);
    store_tile(result_w, kKeyRow, rows, columns, dw + at * K + c, int64{HV} * K, -1.0F);
    multiply(rows, columns, V, d_out, kValueRow, state_t, kKeyRow, result_q, kKeyRow);
    multiply_add<Layout::rows, Lower::a>(rows, columns, rows, P, kRow, keys, kKeyRow, result_q,
                                         kKeyRow, factor);
    multiply<Layout::columns>(rows, columns, V, values_t, kRow, gradient_t, kKeyRow, result_k,
                              kKeyRow);
    if constexpr (SCALAR_GATE)
      end += end_of_chunk(result_k, keys, state_t, gradient_t, decay, rows, columns, row_sums);
    multiply_add<Layout::columns, Lower::a_transposed>(rows, columns, rows, P, kRow, queries,
                                                       kKeyRow, result_k, kKeyRow, decay.until_end);
    if constexpr (SCALAR_GATE) {
      add_row_products(result_q, queries, 1.0F, rows, columns, gate);
      add_row_products(result_k, keys, -1.0F, rows, columns, gate);
    }
    add_rows(keys, diagonal, rows, columns, result_q);
    add_rows(queries, diagonal, rows, columns, result_k);
    store_tile(result_q, kKeyRow, rows, columns, dq + at * K + c, int64{HV} * K);
    store_tile(result_k, kKeyRow, rows, columns, dk_qk + at * K + c, int64{HV} * K);
  }
  if constexpr (SCALAR_GATE) {
    gate[rows - 1] += end;
    store_column(gate, rows, dG_qk + at, HV);
  }
}
