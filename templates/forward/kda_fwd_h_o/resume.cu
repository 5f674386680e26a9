// The state scan and the output of all segments at once, from the states that enter them, one block
// BV columns of V of one segment and value head.
constexpr bool kQueries = true;
constexpr bool kCheckpoints = CHECKPOINTS, kDivided = CHECKPOINT_OFFSETS;

#include "device/cuda/segment.cuh"
#include "device/state_slots.hpp"
#include "forward/kda_fwd_h_o/walk.cuh"

WYVERN_KERNEL(kThreads, 1) {
  const int slot = block_index() / kTilesV / e.HV;
  const Segment segment = locate_segment<VARLEN, SEG * BT>(slot, e, seq_offsets);
  if (!segment.used) return;
  Block b;
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % e.HV;
  b.heads = e.HV;
  if (is_null_sequence<Spec>(segment.sequence, e, state_index, output_state_index)) {
    clear_output<kThreads>(
        TokenRows<DTYPE>{o, o_stride}.at(segment.token, b.head * V + b.tile * BV), segment.tokens,
        BV);
    return;
  }
  b.token = segment.token;
  b.tokens = segment.tokens;
  b.choose_unit(segment_state + (int64{slot} * e.HV + b.head) * K * V);
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
  if (warp < 4) {
    begin_bringing();
    if (warp > 0 && warp <= kConverters)
      convert_chunks(b, warp - 1, Aqk + (b.token * e.HV + b.head) * BT,
                     Gk + (b.token * e.HV + b.head) * K, find_kept(),
                     TokenRows<const DTYPE>{k, k_stride}.at(b.token, e.key_head(b.head) * K));
    else if (thread_index() == 0)
      bring_chunks(b, w_map, qg_map, kg_map, u_map);
  } else {
    begin_walking();
    StateWalk walk{b, (warp - 4) / 4 * kColumns, {}, {}, {}};
    const auto keep = [&](int row) { write_checkpoint<Spec>(walk, row, checkpoints, e); };
    const int64 entering = (int64{slot} * e.HV + b.head) * K * V;
    // Always so; in a branch of its own the load takes no registers from what comes after it.
    if (segment.index >= 0)
      walk.visit<V, false>([from = segment_state + entering, factor = 1.0f / b.unit](
                               int offset, float& x) { x = from[offset] * factor; });
    if (b.tokens > 0) walk_state(walk, e.scale * b.unit, {o, o_stride}, keep);
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
