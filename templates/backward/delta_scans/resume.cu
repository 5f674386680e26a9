// Both walks over all segments at once, from the states that enter them and the gradients of those
// that leave them, one block BV columns of V of one walk through one segment and value head.
// Reverse walks are the first half of the blocks.
constexpr bool kWrites = true;

#include "backward/delta_scans/block.cuh"
#include "device/cuda/segment.cuh"

WYVERN_KERNEL(kThreads, 1) {
  const int walks = block_count() / 2;
  const bool reverse = block_index() < walks;
  const int walk = reverse ? block_index() : block_index() - walks;
  const int head = walk / kTilesV % e.HV;
  const Segment segment = locate_segment<VARLEN, SEG * BT>(walk / kTilesV / e.HV, e, seq_offsets);
  if (!segment.used) return;
  const Sequence sequence =
      locate_sequence<VARLEN, kRows>(segment.sequence, e, seq_offsets, chunk_offsets);
  const auto gate = ScalarGate::of_head(e, A_log, dt_bias, head);
  const ScalarRows rows{{g, g_stride}, {beta, beta_stride}};
  const auto block_of = [&](auto b) {
    b.shared = sm90::swizzled_memory();
    b.token = segment.token;
    b.slot = sequence.slot + segment.index * SEG;
    b.tokens = segment.tokens;
    b.chunks = ceil_div(segment.tokens, kRows);
    b.sequence = segment.sequence;
    b.first = segment.index == 0;
    b.head = head;
    b.key_head = e.key_head(head);
    b.heads = e.HV;
    b.tile = walk % kTilesV;
    return b;
  };
  // Of this segment and value head.
  const auto begin = [at = int64{walk / kTilesV} * K * V](const float* from) {
    return [from = from + at](int offset, float& x) { x = from[offset]; };
  };
  if (reverse) {
    const auto b = block_of(Block<true>{});
    run_block(b, gate, e.scale, rows, q_map, k_map, do_map, [&](int consumer) {
      Reverse own{{b, consumer, {}, {}}};
      own.visit<V, false>(begin(segment_dstate));
      if (b.chunks > 0) own.walk(dstate_map, dv_map, dv);
      if constexpr (INITIAL_STATE) {
        const auto copy = recalled(b);
        if (copy.first)
          own.visit<V, STATE_V_FIRST>(
              [to = dinitial_state + (int64{copy.sequence} * copy.heads + copy.head) * K * V](
                  int offset, float& x) { to[offset] = x; });
      }
    });
  } else {
    const auto b = block_of(Block<false>{});
    if (b.chunks == 0) return;
    run_block(b, gate, e.scale, rows, q_map, k_map, v_map, [&](int consumer) {
      Forward own{{b, consumer, {}, {}}};
      own.visit<V, false>(begin(segment_state));
      own.walk(state_map, z_map);
    });
  }
}
