// The whole forward pass of Kimi Delta Attention, one block BV columns of V of one sequence, or of
// a share of it, and value head: nothing but o and the final state is written.
constexpr bool kQueries = true;

#include "forward/kda_forward/walk.cuh"

WYVERN_KERNEL(kThreads, 1) {
  Block b;
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % HV;
  const int sequences = static_cast<int>(e.N);
  b.sequence = block_index() / kTilesV / HV % sequences;
  if constexpr (VARLEN)
    b.sequence = longest_first<kThreads>(b.sequence, sequences, seq_offsets,
                                         reinterpret_cast<int*>(b.shared));
  const GateForm form(e, HAS_A_LOG ? A_log[b.head] : 0.0f);
  bring_bias(b, form, dt_bias);

  const Sequence sequence =
      locate_sequence<VARLEN, kChunk>(b.sequence, e, seq_offsets, chunk_offsets);
  const TokenRows<const BETA_DTYPE> beta_rows{beta, beta_stride};
  const int chains = kTilesV * HV * sequences;
  const int shares = block_count() / chains;
  const int share = shares - 1 - block_index() / chains;
  // Where older states count after all that a block looks at, it starts with the sequence.
  static_cast<SharedWalk&>(b) = share_out<kChunk>(sequence, share, shares, [&](int first) {
    constexpr int kMost = 4096;
    const int fading =
        fading_tokens(b, sequence.token + int64{first} * kChunk, smaller(first * kChunk, kMost),
                      b.factors<kLayout.decay>(0), form, {g, g_stride}, beta_rows, {k, k_stride});
    return fading > 0 ? fading / kChunk : first;
  });
  if (b.chunks == 0 && !b.to_end) return;
  begin_block(b);

  const int warp = sm90::uniform(warp_index());
  if (warp < 1 + kHelpers) {
    sm90::lower_registers<kHelperRegisters>();
    if (warp > 0)
      prepare_slices(b, warp - 1, e.scale, form, beta_rows);
    else if (lane_index() == 0)
      bring_slices(b, q_map, k_map, v_map, g_map);
  } else {
    sm90::raise_registers<kStateRegisters>();
    const int64 state_start = (int64{b.sequence} * HV + b.head) * K * V;
    StateWalk walk{b, (warp - 1 - kHelpers) / 4 * kColumns, {}, {}, {}, {}, {}};
    const int column = b.tile * BV + walk.column;
    if constexpr (INITIAL_STATE) {
      if (b.from_start)
        sm90::visit_state<V, STATE_V_FIRST>(
            walk.state, column, [from = initial_state + state_start](int offset, float& x) {
              x = to_float(from[offset]);
            });
    }
    if (b.chunks > 0) walk_state(walk, {o, o_stride});
    if constexpr (FINAL_STATE) {
      if (b.to_end)
        sm90::visit_state<V, STATE_V_FIRST>(
            walk.state, column,
            [to = final_state + state_start](int offset, float& x) { to[offset] = x; });
    }
  }
}
