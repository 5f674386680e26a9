// The reverse state scan, one block BV value columns of one sequence and value head.
#include "common/cuda/reverse_scan.cuh"

WYVERN_KERNEL(kThreads, 0)
(const DTYPE* q, const DTYPE* qg, const DTYPE* k, const DTYPE* kg, const DTYPE* w, const DTYPE* dO,
 const DTYPE* dv_local, const float* G, const float* Gk, const float* q_rstd, const float* k_rstd,
 const float* dht, const int32* seq_offsets, const int32* chunk_offsets, DTYPE* dh, DTYPE* du,
 float* dinitial_state, Extents e) {
  const int head = block_index() / kTilesV % HV;
  const int sequence = block_index() / kTilesV / HV;
  const int tile_v = block_index() % kTilesV * BV;
  const Sequence place = locate_sequence<VARLEN, BT>(sequence, e, seq_offsets, chunk_offsets);
  const int64 state_start = (int64{sequence} * HV + head) * K * V;
  const int first_v = tile_v + warp_index() * kStrips * 16;
  State state[kStrips];
  scan_and_store(state,
                 ScanInputs{VECTOR_GATE ? qg : q, VECTOR_GATE ? kg : k, w, dO, dv_local, G, Gk,
                            q_rstd, k_rstd, e.scale},
                 Walk{place.token, place.tokens, head}, place.slot, tile_v, dh, du, [&] {
                   if constexpr (FINAL_STATE)
                     visit_state<STATE_V_FIRST, K, V>(state, first_v, [&](int64 offset, float& x) {
                       x = dht[state_start + offset];
                     });
                 });
  if constexpr (INITIAL_STATE)
    visit_state<STATE_V_FIRST, K, V>(
        state, first_v, [&](int64 offset, float& x) { dinitial_state[state_start + offset] = x; });
}
