// O of one chunk for every value head of one key head: their products of queries and keys are the
// same.
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"
#include "device/state_slots.hpp"
#include "output/fwd_o/cpu_layout.hpp"

constexpr fwd_o::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const int64 head = block[0], slot = block[1];
  const Chunk chunk = find_chunk<VARLEN>(slot, BT, e, seq_offsets, chunk_index);
  const int rows = chunk.rows;
  if (rows <= 0) return;

  if (is_null_sequence<Spec>(chunk.sequence, e, state_index, output_state_index)) {
    clear_output(rows, e.group() * V, o + (chunk.token * e.HV + head * e.group()) * V,
                 int64{e.HV} * V);
    return;
  }
  const auto queries = tile_at<kScratch.queries>(memory);
  const auto keys = tile_at<kScratch.keys>(memory);
  const auto products = tile_at<kScratch.products>(memory);
  const auto attention = tile_at<kScratch.attention>(memory);
  const auto state = tile_at<kScratch.state>(memory);
  const auto result = tile_at<kScratch.result>(memory);
  float* gate = vector_at<kScratch.gate>(memory);
  float* decay = vector_at<kScratch.decay>(memory);
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
    for (int r = 0; r < rows; r += kLanes)
      store(decay + r, exp(load(gate + r)) * load(query_scale + r));
    decay_lower<0, QK_L2NORM>(products, rows, gate, query_scale, key_scale, attention);
    for (int c = 0; c < V; c += BV) {
      const int columns = V - c < BV ? V - c : BV;
      load_tile(h + (slot * e.HV + hv) * K * V + c, V, K, columns, state);
      multiply(rows, columns, K, queries, state, result);
      load_tile(v_new + at * V + c, int64{e.HV} * V, rows, columns, state);
      multiply_add<Layout::rows, Lower::a>(rows, columns, rows, attention, state, result, decay);
      store_tile(result, rows, columns, o + at * V + c, int64{e.HV} * V,
                 STATE_UNIT ? e.scale * state_unit[slot * e.HV + hv] : e.scale);
    }
  }
}
