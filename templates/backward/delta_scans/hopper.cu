// Both walks of the backward pass over the chunks of a sequence, one block BV columns of V of one
// of them and one value head: forward for the states that enter chunks and Z, and backwards, in the
// first half of the blocks, for the gradients of states that leave chunks and dV.
constexpr bool kWrites = true;

#include "backward/delta_scans/block.cuh"

WYVERN_KERNEL(kThreads, 1) {
  const int walks = block_count() / 2;
  const bool reverse = block_index() < walks;
  const int walk = reverse ? block_index() : block_index() - walks;
  const int head = walk / kTilesV % e.HV;
  const int n = walk / kTilesV / e.HV;
  const Sequence sequence = locate_sequence<VARLEN, kRows>(n, e, seq_offsets, chunk_offsets);
  const auto gate = ScalarGate::of_head(e, A_log, dt_bias, head);
  const ScalarRows rows{{g, g_stride}, {beta, beta_stride}};
  const auto state_start = [](const auto& b) {
    const auto copy = recalled(b);
    return (int64{copy.sequence} * copy.heads + copy.head) * K * V;
  };
  const auto block_of = [&](auto b) {
    b.shared = sm90::swizzled_memory();
    b.token = sequence.token;
    b.slot = sequence.slot;
    b.tokens = sequence.tokens;
    b.chunks = ceil_div(sequence.tokens, kRows);
    b.sequence = n;
    b.head = head;
    b.key_head = e.key_head(head);
    b.heads = e.HV;
    b.tile = walk % kTilesV;
    return b;
  };
  if (reverse) {
    const auto b = block_of(Block<true>{});
    run_block(b, gate, e.scale, rows, q_map, k_map, do_map, [&](int consumer) {
      Reverse own{{b, consumer, {}, {}}};
      if constexpr (FINAL_STATE)
        own.visit<V, STATE_V_FIRST>(
            [from = dht + state_start(b)](int offset, float& x) { x = from[offset]; });
      if (b.chunks > 0) own.walk(dstate_map, dv_map, dv);
      if constexpr (INITIAL_STATE)
        own.visit<V, STATE_V_FIRST>(
            [to = dinitial_state + state_start(b)](int offset, float& x) { to[offset] = x; });
    });
  } else {
    const auto b = block_of(Block<false>{});
    if (b.chunks == 0) return;
    run_block(b, gate, e.scale, rows, q_map, k_map, v_map, [&](int consumer) {
      Forward own{{b, consumer, {}, {}}};
      if constexpr (INITIAL_STATE)
        own.visit<V, STATE_V_FIRST>([from = initial_state + state_start(b)](int offset, float& x) {
          x = sm90::opaque(to_float(from[offset]));
        });
      own.walk(state_map, z_map);
    });
  }
}
