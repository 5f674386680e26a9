// dQ, dW, and the parts of dK and of the gate's gradient through attention and the state, of one
// chunk and value head.
#include "device/cpu/backward.hpp"
#include "gradient/bwd_dqkwg/cpu_layout.hpp"

using Backward = ChunkBackward<Spec>;
constexpr bwd_dqkwg::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const int64 hv = block[0], slot = block[1], head = e.key_head(hv);
  const Chunk chunk = find_chunk<VARLEN>(slot, BT, e, seq_offsets, chunk_index);
  const int rows = chunk.rows;
  if (rows <= 0) return;

  const auto d_out = tile_at<kScratch.d_out>(memory);
  const auto d_values = tile_at<kScratch.d_values>(memory);
  const auto values_t = tile_at<kScratch.values_t>(memory);
  const auto products = tile_at<kScratch.products>(memory);
  const auto P = tile_at<kScratch.P>(memory);
  const auto queries = tile_at<kScratch.queries>(memory);
  const auto keys = tile_at<kScratch.keys>(memory);
  const auto state_t = tile_at<kScratch.state_t>(memory);
  const auto gradient_t = tile_at<kScratch.gradient_t>(memory);
  const auto result_q = tile_at<kScratch.result_q>(memory);
  const auto result_k = tile_at<kScratch.result_k>(memory);
  const auto result_w = tile_at<kScratch.result_w>(memory);
  const Backward::Decay decay = Backward::decay_at<kScratch.decay>(memory);
  float* query_scale = vector_at<kScratch.query_scale>(memory);
  float* key_scale = vector_at<kScratch.key_scale>(memory);
  float* diagonal = vector_at<kScratch.diagonal>(memory);
  float* factor = vector_at<kScratch.factor>(memory);
  float* gate = vector_at<kScratch.gate>(memory);
  float* row_sums = vector_at<kScratch.row_sums>(memory);
  float* pairs = vector_at<kScratch.pairs>(memory);
  const Backward::Tokens tokens(chunk.token, rows);

  const int64 at = chunk.token * e.HV + hv, at_k = chunk.token * e.H + head;
  decay.load(G + at, e, rows);
  if constexpr (QK_L2NORM) {
    load_column(q_rstd + at_k, e.H, rows, query_scale);
    load_column(k_rstd + at_k, e.H, rows, key_scale);
  }
  load_tile(rows_in(chunk, dO, dO_stride, hv * V), rows, V, d_out);
  load_tile(du + at * V, int64{e.HV} * V, rows, V, d_values);
  transpose(v_new + at * V, int64{e.HV} * V, rows, V, values_t);
  // Tiles are fp32, so they need no units.
  const float unit = STATE_UNIT ? state_unit[slot * e.HV + hv] : 1.0F;
  const float d_unit = STATE_UNIT ? dstate_unit[slot * e.HV + hv] : 1.0F;
  if constexpr (STATE_UNIT) {
    scale_tile(d_values, rows, V, d_unit);
    scale_tile(values_t, V, rows, unit);
  }
  Backward::attention_gradient(tokens, d_out, values_t, decay, e.scale, products, factor, P, pairs,
                               diagonal);
  for (int r = 0; r < rows; r += kLanes) {
    store(factor + r, load(decay.since_start + r) * e.scale);
    store(gate + r, f32{});
  }
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
    multiply(rows, columns, V, d_values, state_t, result_w);
    store_tile(result_w, rows, columns, dw + at * K + c, int64{e.HV} * K, -1.0F);
    multiply(rows, columns, V, d_out, state_t, result_q);
    multiply_add<Layout::rows, Lower::a>(rows, columns, rows, P, keys, result_q, factor);
    multiply<Layout::columns>(rows, columns, V, values_t, gradient_t, result_k);
    if constexpr (SCALAR_GATE)
      end += Backward::end_of_chunk(tokens, result_k, keys, state_t, gradient_t, decay, columns,
                                    row_sums);
    multiply_add<Layout::columns, Lower::a_transposed>(rows, columns, rows, P, queries, result_k,
                                                       decay.until_end);
    if constexpr (SCALAR_GATE) {
      Backward::add_row_products(result_q, queries, 1.0F, rows, columns, gate);
      Backward::add_row_products(result_k, keys, -1.0F, tokens.first(rows - 1), columns, gate);
    }
    Backward::add_attention_pairs(tokens, pairs, queries, keys, columns, result_q, result_k);
    Backward::add_rows(keys, diagonal, rows, columns, result_q);
    Backward::add_rows(queries, diagonal, rows, columns, result_k);
    store_tile(result_q, rows, columns, dq + at * K + c, int64{e.HV} * K);
    store_tile(result_k, rows, columns, dk_qk + at * K + c, int64{e.HV} * K);
  }
  if constexpr (SCALAR_GATE) {
    gate[rows - 1] += end;
    store_column(gate, rows, dG_qk + at, e.HV);
  }
}
