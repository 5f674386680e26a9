// The state scan of all segments at once, one block BV value columns of one segment and value head.
#include "device/cuda/scan.cuh"
#include "device/cuda/segment.cuh"
#include "device/state_slots.hpp"

using Scan = ForwardScan<Spec>;

WYVERN_KERNEL(Scan::kThreads, min_blocks) {
  const int head = block_index() / Scan::kTilesV % e.HV;
  const int slot = block_index() / Scan::kTilesV / e.HV;
  const int tile_v = block_index() % Scan::kTilesV * BV;
  const Segment segment = locate_segment<VARLEN, BT>(slot, e, seq_offsets);
  if (!segment.used) return;
  const StateSlots slots =
      find_states<Spec>(segment.sequence, head, e, state_stride, state_index, output_state_index);
  if (slots.null) return;  // its output is 0 for any h and V'
  int64 first_chunk = int64{segment.sequence} * ceil_div(static_cast<int>(e.T), BT);
  if constexpr (VARLEN) first_chunk = chunk_offsets[segment.sequence];
  const float* const entering = segment_state + (int64{slot} * e.HV + head) * K * V;
  Scan::Inputs in{scanned_rows<Spec>(k, k_stride, kg, e), w, u, G, Gk, k_rstd, e, {k, k_stride}};
  const ScanRange range{segment.token, segment.tokens, head};
  const int64 chunk = first_chunk + segment.index * e.SEG;
  Scan::State scanned;
  float unit = 1.0f;
  const auto begin = [&] {
    Scan::for_each_element(scanned, tile_v, V,
                           [&](int row, int v, float& x) { x = entering[row * V + v]; });
    unit = Scan::enter_unit(Scan::unit_scratch(shared_memory()), scanned, entering, 1.0f, range, e,
                            state_unit + chunk * e.HV, kValueUnit<Spec>);
    in.u_factor = kValueUnit<Spec> / unit;
  };
  if constexpr (CHECKPOINTS) {
    const auto passed = static_cast<uint32>(segment.index * segment_tokens<BT>(e));
    auto kept =
        find_checkpoints<Spec>(passed, segment.sequence, e, seq_offsets, checkpoint_offsets);
    scan_and_store<Scan>(shared_memory(), scanned, in, range, chunk, tile_v, h, v_new, begin,
                         Scan::by_checkpoints(scanned, in, range, passed, kept,
                                              tile_v + Scan::warp_column(), checkpoints, unit));
  } else {
    scan_and_store<Scan>(shared_memory(), scanned, in, range, chunk, tile_v, h, v_new, begin);
  }
  if (!segment.last) return;
  if constexpr (VARLEN && KEEP_STATES)
    Scan::clear_unused_slots(h, segment.sequence, head, tile_v, chunk_offsets, e);
  Scan::leave_sequence(scanned, tile_v, slots, unit, state, state_scale, final_state);
}
