// dv_local of one chunk for every value head of one key head: their products of queries and keys
// are the same.
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"
#include "device/state_unit.hpp"
#include "gradient/bwd_dv_local/cpu_layout.hpp"

constexpr bwd_dv_local::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const int64 head = block[0];
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int rows = chunk.rows;
  if (rows <= 0) return;

  const auto queries = tile_at<kScratch.queries>(memory);
  const auto keys = tile_at<kScratch.keys>(memory);
  const auto products = tile_at<kScratch.products>(memory);
  const auto attention = tile_at<kScratch.attention>(memory);
  const auto gradients = tile_at<kScratch.gradients>(memory);
  const auto result = tile_at<kScratch.result>(memory);
  float* gate = vector_at<kScratch.gate>(memory);
  float* query_scale = vector_at<kScratch.query_scale>(memory);
  float* key_scale = vector_at<kScratch.key_scale>(memory);

  load_tile(rows_in(chunk, q, q_stride, head * K), rows, K, queries);
  transpose(rows_in(chunk, k, k_stride, head * K).first, k_stride, rows, K, keys);
  multiply<Layout::rows, Lower::c>(rows, rows, K, queries, keys, products);
  fill_column(query_scale, 1.0F, rows);
  if constexpr (QK_L2NORM) {
    load_column(q_rstd + chunk.token * e.H + head, e.H, rows, query_scale);
    load_column(k_rstd + chunk.token * e.H + head, e.H, rows, key_scale);
  }
  for (int64 hv = head * e.group(); hv < (head + 1) * e.group(); ++hv) {
    const int64 at = chunk.token * e.HV + hv;
    load_gates<SCALAR_GATE>(G + at, e.HV, rows, gate);
    decay_lower<0, QK_L2NORM>(products, rows, gate, query_scale, key_scale, attention);
    for (int c = 0; c < V; c += BV) {
      const int columns = V - c < BV ? V - c : BV;
      load_tile(rows_in(chunk, dO, dO_stride, hv * V + c), rows, columns, gradients);
      multiply<Layout::columns, Lower::a_transposed>(rows, columns, rows, attention, gradients,
                                                     result);
      store_tile(result, rows, columns, dv_local + at * V + c, int64{e.HV} * V,
                 e.scale / unit_of_gradients<Spec>(e));
    }
  }
}
