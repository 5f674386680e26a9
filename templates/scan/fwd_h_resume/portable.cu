// The state scan of all segments at once, one block BV value columns of one segment and value head.
#include "device/cuda/scan.cuh"
#include "device/cuda/segment.cuh"

using Scan = ForwardScan<Spec>;

WYVERN_KERNEL(Scan::kThreads, min_blocks) {
  const int head = block_index() / Scan::kTilesV % HV;
  const int slot = block_index() / Scan::kTilesV / HV;
  const int tile_v = block_index() % Scan::kTilesV * BV;
  const Segment segment = locate_segment<VARLEN, SEG * BT>(slot, e, seq_offsets);
  if (!segment.used) return;
  int64 first_chunk = int64{segment.sequence} * ceil_div(static_cast<int>(e.T), BT);
  if constexpr (VARLEN) first_chunk = chunk_offsets[segment.sequence];
  const float* const entering = segment_state + (int64{slot} * HV + head) * K * V;
  Scan::State state;
  scan_and_store<Scan>(
      shared_memory(), state, Scan::Inputs{Scan::key_rows(k, k_stride, kg), w, u, G, Gk, k_rstd},
      Walk{segment.token, segment.tokens, head}, first_chunk + segment.index * SEG, tile_v, h,
      v_new, [&] {
        Scan::for_each_element(state, tile_v, V,
                               [&](int row, int v, float& x) { x = entering[row * V + v]; });
      });
  if (!segment.last) return;
  if constexpr (VARLEN && KEEP_STATES)
    Scan::clear_unused_slots(h, segment.sequence, head, tile_v, chunk_offsets, e);
  if constexpr (FINAL_STATE) {
    const int64 state_start = (int64{segment.sequence} * HV + head) * K * V;
    Scan::for_each_element(state, tile_v, V, [&](int row, int v, float& x) {
      final_state[state_start + state_offset<STATE_V_FIRST, K, V>(row, v)] = x;
    });
  }
}
