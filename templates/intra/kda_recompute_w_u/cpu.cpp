// W, qg, kg and U of one chunk and value head, BV columns at a time.
#include "device/cpu/kda.hpp"
#include "device/state_unit.hpp"
#include "intra/kda_recompute_w_u/cpu_layout.hpp"

constexpr kda_recompute_w_u::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 hv = block[0], head = e.key_head(hv);
  const int64 at = chunk.token * e.HV + hv, at_k = chunk.token * e.H + head;
  const int rows = chunk.rows;
  if (rows <= 0) return;

  const auto inverse = tile_at<kScratch.inverse>(memory);
  const auto queries = tile_at<kScratch.queries>(memory);
  const auto keys = tile_at<kScratch.keys>(memory);
  const auto gates = tile_at<kScratch.gates>(memory);
  const auto factor = tile_at<kScratch.factor>(memory);
  float* rate = vector_at<kScratch.rate>(memory);
  float* q_scale = vector_at<kScratch.q_scale>(memory);
  float* k_scale = vector_at<kScratch.k_scale>(memory);

  load_tile(Tinv + at * BT, int64{e.HV} * BT, rows, BT, inverse);
  load_rates<Spec>(rows_in(chunk, beta, beta_stride, hv), rows, rate);
  for (int c = 0; c < V; c += BV) {
    const int columns = V - c < BV ? V - c : BV;
    load_tile<true>(rows_in(chunk, v, v_stride, hv * V + c), rows, columns, factor, rate);
    if constexpr (ERASE_WRITE)
      multiply_elements(rows_in(chunk, write, write_stride, hv * V + c), rows, columns, factor);
    multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, factor, queries);
    store_tile(queries, rows, columns, u + at * V + c, int64{e.HV} * V, 1.0F / kValueUnit<Spec>);
  }
  if constexpr (QK_L2NORM) {
    load_column(q_rstd + at_k, e.H, rows, q_scale);
    load_column(k_rstd + at_k, e.H, rows, k_scale);
  }
  for (int c = 0; c < K; c += BV) {
    const int columns = K - c < BV ? K - c : BV;
    load_tile<QK_L2NORM>(rows_in(chunk, q, q_stride, head * K + c), rows, columns, queries,
                         q_scale);
    load_tile<QK_L2NORM>(rows_in(chunk, k, k_stride, head * K + c), rows, columns, keys, k_scale);
    load_tile(Gk + at * K + c, int64{e.HV} * K, rows, columns, gates);
    decay_keys(queries, keys, gates, rows, columns, rate, factor);
    if constexpr (ERASE_WRITE)
      multiply_elements(rows_in(chunk, erase, erase_stride, hv * K + c), rows, columns, factor);
    store_tile(queries, rows, columns, qg + at * K + c, int64{e.HV} * K);
    store_tile(keys, rows, columns, kg + at * K + c, int64{e.HV} * K);
    multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, factor, queries);
    store_tile(queries, rows, columns, w + at * K + c, int64{e.HV} * K);
  }
}
