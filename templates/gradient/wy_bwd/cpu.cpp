// The gradients through W, U and A of one chunk and value head, added to those of bwd_dqkwg: dK,
// dV, dbeta and dG.
#include "device/cpu/backward.hpp"
#include "gradient/wy_bwd/cpu_layout.hpp"

using Backward = ChunkBackward<Spec>;
constexpr wy_bwd::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const int64 hv = block[0], head = e.key_head(hv);
  const int64 slot = block[1];
  const Chunk chunk = find_chunk<VARLEN>(slot, BT, e, seq_offsets, chunk_index);
  const int rows = chunk.rows;
  if (rows <= 0) return;

  const auto d_values = tile_at<kScratch.d_values>(memory);
  const auto x = tile_at<kScratch.x>(memory);
  const auto values_t = tile_at<kScratch.values_t>(memory);
  const auto inverse = tile_at<kScratch.inverse>(memory);
  const auto products = tile_at<kScratch.products>(memory);
  const auto N = tile_at<kScratch.N>(memory);
  const auto M = tile_at<kScratch.M>(memory);
  const auto keys = tile_at<kScratch.keys>(memory);
  const auto d_w = tile_at<kScratch.d_w>(memory);
  const auto y = tile_at<kScratch.y>(memory);
  const auto result_k = tile_at<kScratch.result_k>(memory);
  const Backward::Decay decay = Backward::decay_at<kScratch.decay>(memory);
  float* rate = vector_at<kScratch.rate>(memory);
  float* key_scale = vector_at<kScratch.key_scale>(memory);
  float* factor = vector_at<kScratch.factor>(memory);
  float* gate = vector_at<kScratch.gate>(memory);
  float* of_keys = vector_at<kScratch.of_keys>(memory);
  float* of_beta = vector_at<kScratch.of_beta>(memory);
  float* pairs = vector_at<kScratch.pairs>(memory);
  const Backward::Tokens tokens(chunk.token, rows);

  const int64 at = chunk.token * e.HV + hv, at_k = chunk.token * e.H + head;
  const auto beta_chunk = rows_in(chunk, beta, beta_stride, hv);
  decay.load(G + at, e, rows);
  if constexpr (QK_L2NORM) load_column(k_rstd + at_k, e.H, rows, key_scale);
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta_chunk, rows, rate);
  load_tile(Tinv + at * BT, int64{e.HV} * BT, rows, BT, inverse);
  load_tile(du + at * V, int64{e.HV} * V, rows, V, d_values);
  transpose(v_new + at * V, int64{e.HV} * V, rows, V, values_t);
  if constexpr (STATE_UNIT) {
    scale_tile(d_values, rows, V, dstate_unit[slot * e.HV + hv]);
    scale_tile(values_t, V, rows, state_unit[slot * e.HV + hv]);
  }
  multiply<Layout::columns, Lower::a_transposed>(rows, V, rows, inverse, d_values, x);
  Backward::finish_values(x, rows_in(chunk, v, v_stride, hv * V), rate, e, rows, dv + at * V,
                          of_beta);
  Backward::inverse_gradient(tokens, x, values_t, decay, rate, products, factor, N, pairs, M);
  for (int r = 0; r < rows; r += kLanes) {
    store(of_keys + r, f32{});
    store(gate + r, f32{});
  }
  if constexpr (SCALAR_GATE) load_column(dG_qk + at, e.HV, rows, gate);
  fill_column(factor, 1.0F, rows);
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    Backward::load_keys(rows_in(chunk, k, k_stride, head * K + c), key_scale, rows, columns, keys);
    load_tile(dw + at * K + c, int64{e.HV} * K, rows, columns, d_w);
    multiply<Layout::columns, Lower::a_transposed>(rows, columns, rows, inverse, d_w, y);
    multiply_add<Layout::rows, Lower::a>(rows, columns, rows, N, keys, y, decay.since_start);
    multiply<Layout::columns, Lower::a_transposed>(rows, columns, rows, M, keys, result_k);
    Backward::add_row_products(y, keys, 1.0F, rows, columns, of_keys);
    if constexpr (SCALAR_GATE)
      Backward::add_row_products(result_k, keys, -1.0F, rows, columns, gate);
    Backward::add_inverse_pairs(tokens, pairs, rate, keys, columns, y, result_k, of_beta);
    Backward::add_rows(y, rate, rows, columns, result_k);
    load_tile(dk_qk + at * K + c, int64{e.HV} * K, rows, columns, d_w);
    Backward::add_rows(d_w, factor, rows, columns, result_k);
    store_tile(result_k, rows, columns, dk + at * K + c, int64{e.HV} * K);
  }
  for (int r = 0; r < rows; r += kLanes) {
    store(gate + r, load(gate + r) + load(rate + r) * load(of_keys + r));
    store(of_beta + r, load(of_beta + r) + load(of_keys + r));
  }
  Backward::through_activation(beta_chunk, rows, factor, of_beta);
  store_column(of_beta, rows, dbeta + at, e.HV);
  if constexpr (SCALAR_GATE) store_column(gate, rows, dG + at, e.HV);
}
