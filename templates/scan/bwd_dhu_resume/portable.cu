// The reverse state scan of all segments at once, one block BV value columns of one segment and
// value head.
#include "device/cuda/reverse_scan.cuh"
#include "device/cuda/segment.cuh"

using Scan = ReverseScan<Spec>;

WYVERN_KERNEL(Scan::kThreads, 0) {
  const int head = block_index() / Scan::kTilesV % e.HV;
  const int slot = block_index() / Scan::kTilesV / e.HV;
  const int tile_v = block_index() % Scan::kTilesV * BV;
  const Segment segment = locate_segment<VARLEN, BT>(slot, e, seq_offsets);
  if (!segment.used) return;
  int64 first_chunk = int64{segment.sequence} * ceil_div(static_cast<int>(e.T), BT);
  if constexpr (VARLEN) first_chunk = chunk_offsets[segment.sequence];
  const float* const leaving = segment_dstate + (int64{slot} * e.HV + head) * K * V;
  const auto queries = scanned_rows<Spec>(q, q_stride, qg, e),
             keys = scanned_rows<Spec>(k, k_stride, kg, e);
  const TokenRows<const DTYPE> gradients{dO, dO_stride};
  const ScanRange range{segment.token, segment.tokens, head};
  const int64 chunk = first_chunk + segment.index * e.SEG;
  Scan::Inputs in{queries, keys, w, gradients, dv_local, G, Gk, q_rstd, k_rstd, e, e.scale};
  Scan::State state;
  float unit = 1.0f;
  scan_and_store<Scan>(shared_memory(), state, in, range, chunk, tile_v, dh, du, [&] {
    Scan::for_each_element(state, tile_v, V,
                           [&](int row, int v, float& x) { x = leaving[row * V + v]; });
    const float least = unit_of_gradients<Spec>(e);
    unit = Scan::enter_unit(Scan::unit_scratch(shared_memory()), state, leaving, 1.0f, range, e,
                            dstate_unit + chunk * e.HV, least);
    in.scale = e.scale / unit;
    in.dv_factor = least / unit;
  });
  if constexpr (INITIAL_STATE) {
    if (segment.index != 0) return;
    const int64 state_start = (int64{segment.sequence} * e.HV + head) * K * V;
    Scan::for_each_element(state, tile_v, V, [&](int row, int v, float& x) {
      dinitial_state[state_start + state_offset<STATE_V_FIRST, K, V>(row, v)] = x * unit;
    });
  }
}
