// The states that enter segments.
#include "device/cuda/combine.cuh"
#include "device/cuda/state.cuh"
#include "device/state_slots.hpp"

using Combine = SegmentCombine<Spec>;

WYVERN_KERNEL(Combine::kThreads, 0) {
  const int own_head = block_index() / Combine::kTilesV;
  const int own_sequence = block_row();
  if (own_sequence >= e.N) return;
  const StateSlots slots =
      find_states<Spec>(own_sequence, own_head, e, state_stride, state_index, output_state_index);
  if (slots.null) return;  // no scan resumes from its states
  const bool starts = starts_from_slot<Spec>(own_sequence, has_initial_state);
  const float scale = scale_at<Spec>(state_scale, slots.from_scale);
  Combine::scan<false>(
      shared_memory(), segment_M, segment_R, seq_offsets, segment_state, e,
      [&](int /*sequence*/, int /*head*/, int k, int v) {
        if constexpr (!INPLACE_STATE && !INITIAL_STATE) return 0.0f;
        if (!starts) return 0.0f;
        return to_float(
                   (INPLACE_STATE
                        ? state
                        : initial_state)[slots.from + state_offset<STATE_V_FIRST, K, V>(k, v)]) *
               scale;
      });
}
