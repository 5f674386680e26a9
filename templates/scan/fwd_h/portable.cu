// The state scan, one block BV value columns of one sequence and value head.
#include "device/cuda/scan.cuh"

using Scan = ForwardScan<Spec>;

WYVERN_KERNEL(Scan::kThreads, min_blocks) {
  const int head = block_index() / Scan::kTilesV % HV;
  const int sequence = block_index() / Scan::kTilesV / HV;
  const int tile_v = block_index() % Scan::kTilesV * BV;
  const Sequence place = locate_sequence<VARLEN, BT>(sequence, e, seq_offsets, chunk_offsets);
  const Walk walk{place.token, place.tokens, head};
  const int64 state_start = (int64{sequence} * HV + head) * K * V;
  const int first_v = tile_v + Scan::warp_column();
  Scan::State state;
  scan_and_store<Scan>(
      shared_memory(), state, Scan::Inputs{Scan::key_rows(k, k_stride, kg), w, u, G, Gk, k_rstd},
      walk, place.slot, tile_v, h, v_new, [&] {
        if constexpr (INITIAL_STATE)
          visit_state<STATE_V_FIRST, K, V>(state, first_v, [&](int64 offset, float& x) {
            x = to_float(initial_state[state_start + offset]);
          });
      });
  if constexpr (VARLEN && KEEP_STATES)
    Scan::clear_unused_slots(h, sequence, head, tile_v, chunk_offsets, e);
  if constexpr (FINAL_STATE)
    visit_state<STATE_V_FIRST, K, V>(
        state, first_v, [&](int64 offset, float& x) { final_state[state_start + offset] = x; });
}
