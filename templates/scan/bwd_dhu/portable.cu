// The reverse state scan, one block BV value columns of one sequence and value head.
#include "device/cuda/reverse_scan.cuh"

using Scan = ReverseScan<Spec>;

WYVERN_KERNEL(Scan::kThreads, 0) {
  const int head = block_index() / Scan::kTilesV % e.HV;
  const int sequence = block_index() / Scan::kTilesV / e.HV;
  const int tile_v = block_index() % Scan::kTilesV * BV;
  const Sequence place = locate_sequence<VARLEN, BT>(sequence, e, seq_offsets, chunk_offsets);
  const int64 state_start = (int64{sequence} * e.HV + head) * K * V;
  const int first_v = tile_v + Scan::warp_column();
  const auto queries = scanned_rows<Spec>(q, q_stride, qg, e),
             keys = scanned_rows<Spec>(k, k_stride, kg, e);
  const TokenRows<const DTYPE> gradients{dO, dO_stride};
  const ScanRange range{place.token, place.tokens, head};
  Scan::Inputs in{queries, keys, w, gradients, dv_local, G, Gk, q_rstd, k_rstd, e, e.scale};
  Scan::State state;
  float unit = 1.0f;
  scan_and_store<Scan>(shared_memory(), state, in, range, place.slot, tile_v, dh, du, [&] {
    if constexpr (FINAL_STATE)
      visit_state<STATE_V_FIRST, K, V>(
          state, first_v, [&](int64 offset, float& x) { x = dht[state_start + offset]; });
    const float least = unit_of_gradients<Spec>(e);
    unit = Scan::enter_unit(Scan::unit_scratch(shared_memory()), state,
                            FINAL_STATE ? dht + state_start : nullptr, 1.0f, range, e,
                            dstate_unit + place.slot * e.HV, least);
    in.scale = e.scale / unit;
    in.dv_factor = least / unit;
  });
  if constexpr (INITIAL_STATE)
    visit_state<STATE_V_FIRST, K, V>(state, first_v, [&](int64 offset, float& x) {
      dinitial_state[state_start + offset] = x * unit;
    });
}
