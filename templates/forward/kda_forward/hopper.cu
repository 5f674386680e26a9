// The whole forward pass of Kimi Delta Attention, one block BV columns of V of one sequence, or of
// a share of it, and value head: nothing but o, the final state and checkpoints is written.
constexpr bool kQueries = true;
constexpr bool kCheckpoints = CHECKPOINTS;

#include "device/state_slots.hpp"
#include "forward/kda_forward/fading.cuh"

WYVERN_KERNEL(kThreads, 1) {
  Block b;
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % e.HV;
  b.key_head = e.key_head(b.head);
  const int sequences = static_cast<int>(e.N);
  b.sequence = block_index() / kTilesV / e.HV % sequences;
  if constexpr (VARLEN)
    b.sequence = longest_first<kThreads>(b.sequence, sequences, seq_offsets,
                                         reinterpret_cast<int*>(b.shared));
  const Sequence sequence =
      locate_sequence<VARLEN, kChunk>(b.sequence, e, seq_offsets, chunk_offsets);
  const int chains = kTilesV * e.HV * sequences;
  const int shares = block_count() / chains;
  // The last shares come first: where they have the whole sequence to walk through, the others have
  // less. In place the last one waits for the others, so that it comes after them.
  const int turn = block_index() / chains;
  const int share = INPLACE_STATE ? turn : shares - 1 - turn;
  if (is_null_sequence<Spec>(b.sequence, e, state_index, output_state_index)) {
    if (share == 0)
      clear_output<kThreads>(
          TokenRows<DTYPE>{o, o_stride}.at(sequence.token, b.head * V + b.tile * BV),
          sequence.tokens, BV);
    return;
  }
  const GateForm form(e, HAS_A_LOG ? A_log[b.head] : 0.0f);
  bring_bias(b, form, dt_bias);

  const TokenRows<const BETA_DTYPE> beta_rows{beta, beta_stride};
  static_cast<SequenceSplit&>(b) = split_sequence<kChunk>(sequence, share, shares, [&](int first) {
    // A walk through more than these tokens would not be worth the look.
    constexpr int kMost = 4096;
    const int tokens =
        fading_tokens(b, sequence.token + first * kChunk, smaller(first * kChunk, kMost),
                      b.factors<kLayout.decay>(0), form, {g, g_stride}, beta_rows, {k, k_stride});
    return tokens == 0 ? first : ceil_div(tokens, kChunk);
  });
  if (b.chunks == 0 && !b.to_end) {
    if constexpr (INPLACE_STATE)
      if (warp_index() < 4 * kStates) tell_slot_read(slots_read + b.sequence * e.HV + b.head);
    return;
  }
  begin_block(b);

  const auto find_kept = [&] {
    if constexpr (!kCheckpoints) {
      return NoCheckpoints{};
    } else {
      const auto passed = static_cast<uint32>(b.token - sequence.token);
      return find_checkpoints<Spec>(passed + static_cast<uint32>(b.overlap) * kChunk, b.sequence, e,
                                    seq_offsets, checkpoint_offsets)
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
    // Computed where they are used: in between registers are few.
    const auto slots = [&] {
      return find_states<Spec>(b.sequence, b.head, e, state_stride, state_index,
                               output_state_index);
    };
    StateWalk walk{b, (warp - kFrontWarps) / 4 * kColumns, {}, {}, {}, {}, {}};
    const int column = b.tile * BV + walk.column;
    const auto keep = [&](int row) { write_checkpoint<Spec>(walk, row, checkpoints, e); };
    if constexpr (INPLACE_STATE || INITIAL_STATE) {
      if (b.from_start && starts_from_slot<Spec>(b.sequence, has_initial_state))
        sm90::visit_state<V, STATE_V_FIRST>(
            walk.state, column,
            [from = (INPLACE_STATE ? state : initial_state) + slots().from](int offset, float& x) {
              x = sm90::opaque(to_float(from[offset]));
            });
    }
    if constexpr (INPLACE_STATE)
      if (!b.to_end) tell_slot_read(slots_read + b.sequence * e.HV + b.head);
    if (b.chunks > 0) walk_state(walk, {o, o_stride}, keep);
    if constexpr (INPLACE_STATE) {
      if (b.to_end) {
        await_counter(
            slots_read + b.sequence * e.HV + b.head,
            (block_count() / (kTilesV * e.HV * static_cast<int>(e.N)) - 1) * kTilesV * kStates * 4);
        walk.write<STATE_V_FIRST>(state + slots().to);
      }
    }
    if constexpr (FINAL_STATE) {
      if (b.to_end) walk.write<STATE_V_FIRST>(final_state + slots().to);
    }
  }
}
