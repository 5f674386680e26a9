// The forward pass over all segments at once, from the states that enter them, one block BV columns
// of V of one segment and value head.
constexpr bool kQueries = true;
constexpr bool kCheckpoints = CHECKPOINTS, kDivided = CHECKPOINT_OFFSETS;

#include "device/cuda/segment.cuh"
#include "device/state_slots.hpp"
#include "forward/delta_forward/block.cuh"

WYVERN_KERNEL(kThreads, 1) {
  const Segment segment =
      locate_segment<VARLEN, SEG * BT>(block_index() / kTilesV / e.HV, e, seq_offsets);
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
  b.sequence = segment.sequence;
  b.token = segment.token;
  b.tokens = segment.tokens;
  b.chunks = ceil_div(segment.tokens, kRows);
  // No chunk is in front of what the block writes. Known to the compiler, that costs registers.
  b.warm = sm90::opaque(0);
  b.to_end = segment.last;
  GateForm form{e.gate_floor, 0.0f, 0.0f};
  if constexpr (GATE_IN_KERNEL) {
    form.A_log = A_log[b.head];
    if constexpr (HAS_DT_BIAS) form.bias = dt_bias[b.head];
  }
  const ScalarRows rows{{g, g_stride}, {beta, beta_stride}};
  begin_block(b);

  const auto find_kept = [&] {
    if constexpr (!kCheckpoints) {
      return NoCheckpoints{};
    } else {
      const auto passed = static_cast<uint32>(segment.index * (SEG * BT));
      return find_checkpoints<Spec>(passed, b.sequence, e, seq_offsets, checkpoint_offsets)
          .counted_from(passed);
    }
  };
  const auto keep = [&](auto& walker, int row, float factor) {
    write_checkpoint<Spec>(walker, row, factor, checkpoints, e);
  };
  run_block(b, form, e.scale, rows, q_map, k_map, v_map, 0, find_kept, [&](auto& walker) {
    const int64 slot = block_index() / kTilesV;  // of a segment and value head
    walker.template visit<V, false>(
        [from = segment_state + slot * K * V](int offset, float& x) { x = from[offset]; });
    if (b.chunks > 0) walk(walker, o_map, {o, o_stride}, keep);
    if constexpr (INPLACE_STATE || FINAL_STATE) {
      const Block copy = recalled(b);
      if (copy.to_end) {
        const int64 leaving = find_states<Spec>(copy.sequence, copy.head, e, state_stride,
                                                state_index, output_state_index)
                                  .to;
        if constexpr (INPLACE_STATE)
          walker.template visit<V, STATE_V_FIRST>([to = state + leaving](int offset, float& x) {
            to[offset] = from_float<STATE_DTYPE>(x);
          });
        else
          walker.template visit<V, STATE_V_FIRST>(
              [to = final_state + leaving](int offset, float& x) { to[offset] = x; });
      }
    }
    if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
  });
}
