// Both walks of the backward pass of Kimi Delta Attention over prepared chunks, one block BV
// columns of V of one walk through a sequence and value head: forward for the states that enter
// chunks and Z, and backwards, in the first half of the blocks, for the gradients of states that
// leave chunks and dV.
#include "backward/kda_scans/walk.cuh"

WYVERN_KERNEL(kThreads, 1) {
  const int walks = block_count() / 2;
  const bool reverse = block_index() < walks;
  const int walk = reverse ? block_index() : block_index() - walks;
  const int n = walk / kTilesV / e.HV;
  const Sequence sequence = locate_sequence<VARLEN, kRows>(n, e, seq_offsets, chunk_offsets);
  const auto block_of = [&](auto b) {
    b.shared = sm90::swizzled_memory();
    b.token = sequence.token;
    b.slot = sequence.slot;
    b.tokens = sequence.tokens;
    b.chunks = ceil_div(sequence.tokens, kRows);
    b.head = walk / kTilesV % e.HV;
    b.heads = e.HV;
    b.tile = walk % kTilesV;
    return b;
  };
  const auto b = block_of(Block<false>{});
  const int64 state_start = (int64{n} * e.HV + b.head) * K * V;
  if (reverse) {
    run_block(block_of(Block<true>{}), {rows_map, squares_map, do_map}, decay,
              [&](const Block<true>& own, int consumer) {
                Reverse at{{own, consumer, {}, {}}};
                if constexpr (FINAL_STATE)
                  at.visit<STATE_V_FIRST>(
                      [from = dht + state_start](int offset, float& x) { x = from[offset]; });
                if (own.chunks > 0) at.walk(dstate_map, dv_map, dv);
                if constexpr (INITIAL_STATE)
                  at.visit<STATE_V_FIRST>([to = dinitial_state + state_start](
                                              int offset, float& x) { to[offset] = x; });
              });
  } else {
    if (b.chunks == 0) return;
    run_block(b, {rows_map, squares_map, v_map}, decay, [&](const Block<false>& own, int consumer) {
      Forward at{{own, consumer, {}, {}}};
      if constexpr (INITIAL_STATE)
        at.visit<STATE_V_FIRST>([from = initial_state + state_start](int offset, float& x) {
          x = sm90::opaque(to_float(from[offset]));
        });
      at.walk(state_map, z_map);
    });
  }
}
