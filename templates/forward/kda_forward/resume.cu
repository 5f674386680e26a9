// The forward pass of Kimi Delta Attention over all segments at once, from the states that enter
// them, one block BV columns of V of one segment and value head.
constexpr bool kQueries = true;
constexpr bool kCheckpoints = CHECKPOINTS;

#include "device/cuda/segment.cuh"
#include "device/state_slots.hpp"
#include "forward/kda_forward/walk.cuh"

WYVERN_KERNEL(kThreads, 1) {
  const int slot = block_index() / kTilesV / e.HV;
  const Segment segment = locate_segment<VARLEN, SEG * BT>(slot, e, seq_offsets);
  if (!segment.used) return;
  Block b{};
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % e.HV;
  b.key_head = e.key_head(b.head);
  if (is_null_sequence<Spec>(segment.sequence, e, state_index, output_state_index)) {
    clear_output<kThreads>(
        TokenRows<DTYPE>{o, o_stride}.at(segment.token, b.head * V + b.tile * BV), segment.tokens,
        BV);
    return;
  }
  b.token = segment.token;
  b.tokens = segment.tokens;
  // No slice is in front of what the block writes. Were that known, the walk's loop would be one
  // piece of code, in which ptxas runs out of registers and has products wait for each other.
  b.overlap = sm90::opaque(0);
  const GateForm form(e, HAS_A_LOG ? A_log[b.head] : 0.0f);
  bring_bias(b, form, dt_bias);
  const TokenRows<const BETA_DTYPE> beta_rows{beta, beta_stride};
  begin_block(b);

  const auto find_kept = [&] {
    if constexpr (!kCheckpoints) {
      return NoCheckpoints{};
    } else {
      const auto passed = static_cast<uint32>(segment.index * (SEG * BT));
      return find_checkpoints<Spec>(passed, segment.sequence, e, seq_offsets, checkpoint_offsets)
          .counted_from(passed);
    }
  };
  const int warp = sm90::uniform(warp_index());
  if (warp < kFrontWarps) {
    sm90::lower_registers<kHelperRegisters>();
    if (warp > 0) {
      prepare_slices(b, warp - 1, e.scale, form, beta_rows);
    } else {
      const auto kept = find_kept();
      if (lane_index() == 0) bring_slices(b, q_map, k_map, v_map, g_map, kept);
    }
  } else {
    sm90::raise_registers<kStateRegisters>();
    StateWalk walk{b, (warp - kFrontWarps) / 4 * kColumns, {}, {}, {}, {}, {}};
    const int column = b.tile * BV + walk.column;
    const auto keep = [&](int row) { write_checkpoint<Spec>(walk, row, checkpoints, e); };
    const int64 entering = (int64{slot} * e.HV + b.head) * K * V;
    // Always so; in a branch of its own the load takes no registers from what comes after it.
    if (segment.index >= 0)
      sm90::visit_state<V, false>(
          walk.state, column,
          [from = segment_state + entering](int offset, float& x) { x = from[offset]; });
    if (b.tokens > 0) walk_state(walk, {o, o_stride}, keep);
    if constexpr (INPLACE_STATE || FINAL_STATE) {
      // Found again: in between registers are few.
      const Segment end = locate_segment<VARLEN, SEG * BT>(sm90::opaque(slot), e, seq_offsets);
      if (end.last) {
        const int64 leaving = find_states<Spec>(end.sequence, b.head, e, state_stride, state_index,
                                                output_state_index)
                                  .to;
        if constexpr (INPLACE_STATE)
          walk.write<STATE_V_FIRST>(state + leaving);
        else
          walk.write<STATE_V_FIRST>(final_state + leaving);
      }
    }
  }
}
