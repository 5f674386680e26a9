// The gradients behind W, U and A of one chunk and value head, added to what bwd_dqkwg made: dK,
// dV, dbeta and dG.
#include "device/cpu/backward.hpp"

WYVERN_BLOCK {
  const int64 hv = block[0], head = hv / (HV / H);
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int rows = chunk.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  float* d_values = scratch.tile(BT, V);
  float* x = scratch.tile(BT, V);
  float* values_t = scratch.tile(V, BT);
  float* inverse = scratch.tile(BT, BT);
  float* products = scratch.tile(BT, BT);
  float* N = scratch.tile(BT, BT);
  float* M = scratch.tile(BT, BT);
  float* keys = scratch.tile(BT, BK);
  float* d_w = scratch.tile(BT, BK);  // then dk_qk
  float* y = scratch.tile(BT, BK);
  float* result_k = scratch.tile(BT, BK);
  const Decay decay(scratch);
  float* rate = scratch.vector(BT);
  float* key_scale = scratch.vector(BT);
  float* factor = scratch.vector(BT);
  float* gate = scratch.vector(BT);
  float* of_keys = scratch.vector(BT);
  float* of_beta = scratch.vector(BT);

  const int64 at = chunk.token * HV + hv, at_k = chunk.token * H + head;
  decay.load(G + at, rows);
  if constexpr (QK_L2NORM) load_column(k_rstd + at_k, H, rows, key_scale);
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta + at, HV, rows, rate);
  load_tile(Tinv + at * BT, int64{HV} * BT, rows, BT, inverse, kRow);
  load_tile(du + at * V, int64{HV} * V, rows, V, d_values, kValueRow);
  transpose<true>(v_new + at * V, int64{HV} * V, rows, V, values_t, kRow);
  multiply<Layout::columns, Lower::a_transposed>(rows, V, rows, inverse, kRow, d_values, kValueRow,
                                                 x, kValueRow);
  finish_values(x, v + at * V, rate, rows, dv + at * V, of_beta);
  inverse_gradient(x, values_t, decay, rate, rows, products, factor, N, M);
  for (int r = 0; r < rows; r += kLanes) {
    store(of_keys + r, f32{});
    store(gate + r, f32{});
  }
  if constexpr (SCALAR_GATE) load_column(dG_qk + at, HV, rows, gate);
  fill_column(factor, 1.0F, rows);
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    load_keys(k + at_k * K + c, key_scale, rows, columns, keys);
    load_tile(dw + at * K + c, int64{HV} * K, rows, columns, d_w, kKeyRow);
    multiply<Layout::columns, Lower::a_transposed>(rows, columns, rows, inverse, kRow, d_w, kKeyRow,
                                                   y, kKeyRow);
    multiply_add<Layout::rows, Lower::a>(rows, columns, rows, N, kRow, keys, kKeyRow, y, kKeyRow,
                                         decay.since_start);
    multiply<Layout::columns, Lower::a_transposed>(rows, columns, rows, M, kRow, keys, kKeyRow,
                                                   result_k, kKeyRow);
    add_row_products(y, keys, 1.0F, rows, columns, of_keys);
    if constexpr (SCALAR_GATE) add_row_products(result_k, keys, -1.0F, rows, columns, gate);
    add_rows(y, rate, rows, columns, result_k);
    load_tile(dk_qk + at * K + c, int64{HV} * K, rows, columns, d_w, kKeyRow);
    add_rows(d_w, factor, rows, columns, result_k);
    store_tile(result_k, kKeyRow, rows, columns, dk + at * K + c, int64{HV} * K);
  }
  for (int r = 0; r < rows; r += kLanes) {
    store(gate + r, load(gate + r) + load(rate + r) * load(of_keys + r));
    store(of_beta + r, load(of_beta + r) + load(of_keys + r));
  }
  through_activation<BETA_SIGMOID, NEG_EIGVAL>(beta + at, rows, factor, of_beta);
  store_column(of_beta, rows, dbeta + at, HV);
  if constexpr (SCALAR_GATE) store_column(gate, rows, dG + at, HV);
}
