// The state scan, one block BV value columns of one sequence and value head.
#include "device/cuda/scan.cuh"
#include "device/state_slots.hpp"

using Scan = ForwardScan<Spec>;

WYVERN_KERNEL(Scan::kThreads, min_blocks) {
  const int head = block_index() / Scan::kTilesV % e.HV;
  const int sequence = block_index() / Scan::kTilesV / e.HV;
  const int tile_v = block_index() % Scan::kTilesV * BV;
  const Sequence place = locate_sequence<VARLEN, BT>(sequence, e, seq_offsets, chunk_offsets);
  const ScanRange range{place.token, place.tokens, head};
  const StateSlots slots =
      find_states<Spec>(sequence, head, e, state_stride, state_index, output_state_index);
  if (slots.null) return;  // its output is 0 for any h and V'
  Scan::Inputs in{scanned_rows<Spec>(k, k_stride, kg, e), w, u, G, Gk, k_rstd, e, {k, k_stride}};
  Scan::State scanned;
  float unit = 1.0f;
  const auto begin = [&] {
    const bool starts =
        (INPLACE_STATE || INITIAL_STATE) && starts_from_slot<Spec>(sequence, has_initial_state);
    const auto* const from = (INPLACE_STATE ? state : initial_state) + slots.from;
    unit = Scan::enter_sequence(shared_memory(), scanned, tile_v, starts ? from : nullptr,
                                scale_at<Spec>(state_scale, slots.from_scale), range, e,
                                state_unit + place.slot * e.HV);
    in.u_factor = kValueUnit<Spec> / unit;
  };
  if constexpr (CHECKPOINTS) {
    auto kept = find_checkpoints<Spec>(0, sequence, e, seq_offsets, checkpoint_offsets);
    scan_and_store<Scan>(shared_memory(), scanned, in, range, place.slot, tile_v, h, v_new, begin,
                         Scan::by_checkpoints(scanned, in, range, 0, kept,
                                              tile_v + Scan::warp_column(), checkpoints, unit));
  } else {
    scan_and_store<Scan>(shared_memory(), scanned, in, range, place.slot, tile_v, h, v_new, begin);
  }
  if constexpr (VARLEN && KEEP_STATES)
    Scan::clear_unused_slots(h, sequence, head, tile_v, chunk_offsets, e);
  Scan::leave_sequence(scanned, tile_v, slots, unit, state, state_scale, final_state);
}
