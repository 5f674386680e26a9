// O of one chunk and value head, BV columns at a time.
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"
#include "device/state_slots.hpp"
#include "output/kda_fwd_o/cpu_layout.hpp"

constexpr kda_fwd_o::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const int64 hv = block[0], slot = block[1];
  const Chunk chunk = find_chunk<VARLEN>(slot, BT, e, seq_offsets, chunk_index);
  const int64 at = chunk.token * e.HV + hv;
  const int rows = chunk.rows;
  if (rows <= 0) return;

  if (is_null_sequence<Spec>(chunk.sequence, e, state_index, output_state_index)) {
    clear_output(rows, V, o + at * V, int64{e.HV} * V);
    return;
  }
  const auto queries = tile_at<kScratch.queries>(memory);
  const auto attention = tile_at<kScratch.attention>(memory);
  const auto state = tile_at<kScratch.state>(memory);
  const auto result = tile_at<kScratch.result>(memory);
  float* ones = vector_at<kScratch.ones>(memory);

  fill_column(ones, 1.0F, BT);
  load_tile(qg + at * K, int64{e.HV} * K, rows, K, queries);
  load_tile(Aqk + at * BT, int64{e.HV} * BT, rows, BT, attention);
  for (int c = 0; c < V; c += BV) {
    const int columns = V - c < BV ? V - c : BV;
    load_tile(h + (slot * e.HV + hv) * K * V + c, V, K, columns, state);
    multiply(rows, columns, K, queries, state, result);
    load_tile(v_new + at * V + c, int64{e.HV} * V, rows, columns, state);
    multiply_add<Layout::rows, Lower::a>(rows, columns, rows, attention, state, result, ones);
    store_tile(result, rows, columns, o + at * V + c, int64{e.HV} * V,
               STATE_UNIT ? e.scale * state_unit[slot * e.HV + hv] : e.scale);
  }
}
