// The state scan, one block BV value columns of one sequence and value head.
#include "common/cuda/scan.cuh"

WYVERN_KERNEL(kThreads, min_blocks)
(const DTYPE* k, const DTYPE* kg, const DTYPE* w, const DTYPE* u, const float* G, const float* Gk,
 const float* k_rstd, const STATE_DTYPE* initial_state, const int32* seq_offsets,
 const int32* chunk_offsets, DTYPE* h, DTYPE* v_new, float* final_state, Extents e) {
  const int head = block_index() / kTilesV % HV;
  const int sequence = block_index() / kTilesV / HV;
  const int tile_v = block_index() % kTilesV * BV;
  Walk walk{sequence * e.T, static_cast<int>(e.T), head};
  int64 slot = int64{sequence} * ceil_div(walk.tokens, BT);
  if constexpr (VARLEN) {
    walk.token = seq_offsets[sequence];
    walk.tokens = seq_offsets[sequence + 1] - seq_offsets[sequence];
    slot = chunk_offsets[sequence];
  }
  const int64 state_start = (int64{sequence} * HV + head) * K * V;
  State state[kStrips];
  scan_and_store(state, {VECTOR_GATE ? kg : k, w, u, G, Gk, k_rstd}, walk, slot, tile_v, {h, v_new},
                 [&] {
                   if constexpr (INITIAL_STATE)
                     for_each_element(state, tile_v, V, [&](int row, int v, float& x) {
                       x = to_float(initial_state[state_start + state_offset<STATE_V_FIRST, K, V>(row, v)]);
                     });
                 });
  if constexpr (VARLEN && KEEP_STATES)
    clear_unused_slots(h, sequence, head, tile_v, chunk_offsets, e);
  if constexpr (FINAL_STATE)
    for_each_element(state, tile_v, V, [&](int row, int v, float& x) {
      final_state[state_start + state_offset<STATE_V_FIRST, K, V>(row, v)] = x;
    });
}
