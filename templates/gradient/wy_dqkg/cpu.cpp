// Every gradient of one chunk and value head from the state's gradients: bwd_dqkwg and wy_bwd in
// one. With X = Tinv^T dU, Tinv^T dW is -X S^T, and dW is never formed.
#include "device/cpu/backward.hpp"
#include "gradient/wy_dqkg/cpu_layout.hpp"

using Backward = ChunkBackward<Spec>;
constexpr wy_dqkg::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const int64 hv = block[0], slot = block[1], head = e.key_head(hv);
  const Chunk chunk = find_chunk<VARLEN>(slot, BT, e, seq_offsets, chunk_index);
  const int rows = chunk.rows;
  if (rows <= 0) return;

  const auto d_out = tile_at<kScratch.d_out>(memory);
  const auto x = tile_at<kScratch.x>(memory);
  const auto values_t = tile_at<kScratch.values_t>(memory);
  const auto inverse = tile_at<kScratch.inverse>(memory);
  const auto products = tile_at<kScratch.products>(memory);
  const auto N = tile_at<kScratch.N>(memory);
  const auto M = tile_at<kScratch.M>(memory);
  const auto queries = tile_at<kScratch.queries>(memory);
  const auto keys = tile_at<kScratch.keys>(memory);
  const auto state_t = tile_at<kScratch.state_t>(memory);
  const auto gradient_t = tile_at<kScratch.gradient_t>(memory);
  const auto result_q = tile_at<kScratch.result_q>(memory);
  const auto result_k = tile_at<kScratch.result_k>(memory);
  const auto y = tile_at<kScratch.y>(memory);
  const Backward::Decay decay = Backward::decay_at<kScratch.decay>(memory);
  float* rate = vector_at<kScratch.rate>(memory);
  float* query_scale = vector_at<kScratch.query_scale>(memory);
  float* key_scale = vector_at<kScratch.key_scale>(memory);
  float* diagonal = vector_at<kScratch.diagonal>(memory);
  float* query_factor = vector_at<kScratch.query_factor>(memory);
  float* y_factor = vector_at<kScratch.y_factor>(memory);
  float* ones = vector_at<kScratch.ones>(memory);
  float* gate = vector_at<kScratch.gate>(memory);
  float* of_keys = vector_at<kScratch.of_keys>(memory);
  float* of_beta = vector_at<kScratch.of_beta>(memory);
  float* row_sums = vector_at<kScratch.row_sums>(memory);
  float* pairs_P = vector_at<kScratch.pairs_P>(memory);
  float* pairs_N = vector_at<kScratch.pairs_N>(memory);
  const Backward::Tokens tokens(chunk.token, rows);

  const int64 at = chunk.token * e.HV + hv, at_k = chunk.token * e.H + head;
  const auto beta_chunk = rows_in(chunk, beta, beta_stride, hv);
  decay.load(G + at, e, rows);
  if constexpr (QK_L2NORM) {
    load_column(q_rstd + at_k, e.H, rows, query_scale);
    load_column(k_rstd + at_k, e.H, rows, key_scale);
  }
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta_chunk, rows, rate);
  load_tile(Tinv + at * BT, int64{e.HV} * BT, rows, BT, inverse);
  load_tile(du + at * V, int64{e.HV} * V, rows, V, d_out);
  transpose(v_new + at * V, int64{e.HV} * V, rows, V, values_t);
  // Tiles are fp32, so they need no units.
  const float unit = STATE_UNIT ? state_unit[slot * e.HV + hv] : 1.0F;
  const float d_unit = STATE_UNIT ? dstate_unit[slot * e.HV + hv] : 1.0F;
  if constexpr (STATE_UNIT) {
    scale_tile(d_out, rows, V, d_unit);
    scale_tile(values_t, V, rows, unit);
  }
  multiply<Layout::columns, Lower::a_transposed>(rows, V, rows, inverse, d_out, x);
  Backward::finish_values(x, rows_in(chunk, v, v_stride, hv * V), rate, e, rows, dv + at * V,
                          of_beta);
  Backward::inverse_gradient(tokens, x, values_t, decay, rate, products, ones, N, pairs_N, M);
  const auto P = inverse;
  load_tile(rows_in(chunk, dO, dO_stride, hv * V), rows, V, d_out);
  Backward::attention_gradient(tokens, d_out, values_t, decay, e.scale, products, ones, P, pairs_P,
                               diagonal);
  for (int r = 0; r < rows; r += kLanes) {
    store(query_factor + r, load(decay.since_start + r) * e.scale);
    store(y_factor + r, -load(decay.since_start + r));
    store(of_keys + r, f32{});
    store(gate + r, f32{});
  }
  fill_column(ones, 1.0F, rows);
  float end = 0.0F;
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    const int64 state_at = ((slot * e.HV + hv) * K + c) * V;
    Backward::load_keys(rows_in(chunk, q, q_stride, head * K + c), query_scale, rows, columns,
                        queries);
    Backward::load_keys(rows_in(chunk, k, k_stride, head * K + c), key_scale, rows, columns, keys);
    transpose(h + state_at, V, columns, V, state_t);
    transpose(dh + state_at, V, columns, V, gradient_t);
    if constexpr (STATE_UNIT) {
      scale_tile(state_t, V, columns, unit);
      scale_tile(gradient_t, V, columns, d_unit);
    }
    multiply(rows, columns, V, d_out, state_t, result_q);
    multiply_add<Layout::rows, Lower::a>(rows, columns, rows, P, keys, result_q, query_factor);
    multiply(rows, columns, V, x, state_t, y);
    multiply_add<Layout::rows, Lower::a>(rows, columns, rows, N, keys, y, y_factor);
    multiply<Layout::columns>(rows, columns, V, values_t, gradient_t, result_k);
    if constexpr (SCALAR_GATE)
      end += Backward::end_of_chunk(tokens, result_k, keys, state_t, gradient_t, decay, columns,
                                    row_sums);
    multiply_add<Layout::columns, Lower::a_transposed>(rows, columns, rows, P, queries, result_k,
                                                       decay.until_end);
    multiply_add<Layout::columns, Lower::a_transposed>(rows, columns, rows, M, keys, result_k,
                                                       ones);
    Backward::add_row_products(y, keys, 1.0F, rows, columns, of_keys);
    if constexpr (SCALAR_GATE) {
      Backward::add_row_products(result_q, queries, 1.0F, rows, columns, gate);
      Backward::add_row_products(result_k, keys, -1.0F, tokens.first(rows - 1), columns, gate);
    }
    Backward::add_attention_pairs(tokens, pairs_P, queries, keys, columns, result_q, result_k);
    Backward::add_inverse_pairs(tokens, pairs_N, rate, keys, columns, y, result_k, of_beta);
    Backward::add_rows(keys, diagonal, rows, columns, result_q);
    Backward::add_rows(queries, diagonal, rows, columns, result_k);
    Backward::add_rows(y, rate, rows, columns, result_k);
    store_tile(result_q, rows, columns, dq + at * K + c, int64{e.HV} * K);
    store_tile(result_k, rows, columns, dk + at * K + c, int64{e.HV} * K);
  }
  for (int r = 0; r < rows; r += kLanes) {
    store(gate + r, load(gate + r) + load(rate + r) * load(of_keys + r));
    store(of_beta + r, load(of_beta + r) + load(of_keys + r));
  }
  Backward::through_activation(beta_chunk, rows, ones, of_beta);
  store_column(of_beta, rows, dbeta + at, e.HV);
  if constexpr (SCALAR_GATE) {
    gate[rows - 1] += end;
    store_column(gate, rows, dG + at, e.HV);
  }
}
