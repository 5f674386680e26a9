// The state scan, one block BV value columns of one sequence and value head.
#include "common/cuda/scan.cuh"

WYVERN_KERNEL(kThreads, min_blocks)
(const DTYPE* k, const DTYPE* kg, const DTYPE* w, const U_DTYPE* u, const float* G, const float* Gk,
 const float* k_rstd, const STATE_DTYPE* initial_state, const int32* seq_offsets,
 const int32* chunk_offsets, DTYPE* h, DTYPE* v_new, float* final_state, Extents e) {
  const int head = block_index() / kTilesV % HV;
  const int sequence = block_index() / kTilesV / HV;
  const int tile_v = block_index() % kTilesV * BV;
  const Sequence place = locate_sequence<VARLEN, BT>(sequence, e, seq_offsets, chunk_offsets);
  const Walk walk{place.token, place.tokens, head};
  const int64 state_start = (int64{sequence} * HV + head) * K * V;
  const int first_v = tile_v + warp_index() * kStrips * 16;
  State state[kStrips];
  scan_and_store(state, ScanInputs{VECTOR_GATE ? kg : k, w, u, G, Gk, k_rstd}, walk, place.slot,
                 tile_v, h, v_new, [&] {
                   if constexpr (INITIAL_STATE)
                     visit_state<STATE_V_FIRST, K, V>(state, first_v, [&](int64 offset, float& x) {
                       x = to_float(initial_state[state_start + offset]);
                     });
                 });
  if constexpr (VARLEN && KEEP_STATES)
    clear_unused_slots(h, sequence, head, tile_v, chunk_offsets, e);
  if constexpr (FINAL_STATE)
    visit_state<STATE_V_FIRST, K, V>(
        state, first_v, [&](int64 offset, float& x) { final_state[state_start + offset] = x; });
}
