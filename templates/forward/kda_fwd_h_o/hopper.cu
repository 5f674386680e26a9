// The state scan and the output of Kimi Delta Attention in one kernel, one block BV columns of V of
// one sequence, or of a share of it, and value head: neither states nor V' are written.
constexpr bool kQueries = true;
constexpr bool kCheckpoints = CHECKPOINTS, kDivided = CHECKPOINT_OFFSETS;

#include "device/cuda/chunk.cuh"
#include "device/cuda/split.cuh"
#include "device/state_slots.hpp"
#include "forward/kda_fwd_h_o/fading.cuh"
#include "forward/kda_fwd_h_o/walk.cuh"

WYVERN_KERNEL(kThreads, 1) {
  Block b;
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % e.HV;
  b.heads = e.HV;
  const int sequences = static_cast<int>(e.N);
  int n = block_index() / kTilesV / e.HV % sequences;
  if constexpr (VARLEN)
    n = longest_first<kThreads>(n, sequences, seq_offsets, reinterpret_cast<int*>(b.shared));
  const Sequence sequence = locate_sequence<VARLEN, kChunk>(n, e, seq_offsets, chunk_offsets);
  const int chains = kTilesV * e.HV * sequences;
  const int shares = block_count() / chains;
  // The last shares come first: where one has the whole sequence to walk through, it is the last.
  // In place it waits for the others, so that it comes after them.
  const int turn = block_index() / chains;
  const int share = INPLACE_STATE ? turn : shares - 1 - turn;
  if (is_null_sequence<Spec>(n, e, state_index, output_state_index)) {
    if (share == 0)
      clear_output<kThreads>(
          TokenRows<DTYPE>{o, o_stride}.at(sequence.token, b.head * V + b.tile * BV),
          sequence.tokens, BV);
    return;
  }
  const SequenceSplit own = split_all_or_none<kChunk>(sequence, share, shares, [&](int first) {
    return chunks_to_fade(first, [&](int chunk, float most) {
      const int64 row = (sequence.token + int64{chunk} * kChunk) * e.HV + b.head;
      return growth_of_chunk(w + row * K, kg + row * K, Gk + (row + int64{kChunk - 1} * e.HV) * K,
                             int64{e.HV} * K, most, b.decay(0));
    });
  });
  if (own.chunks == 0 && !own.to_end) {
    if constexpr (INPLACE_STATE)
      if (warp_index() < 4 * kStates) tell_slot_read(slots_read + n * e.HV + b.head);
    return;
  }
  b.token = own.token;
  b.tokens = own.tokens;
  b.overlap = own.overlap;
  if constexpr (STATE_UNIT) {
    const auto* const states = INPLACE_STATE ? state : initial_state;
    const bool starts = (INPLACE_STATE || INITIAL_STATE) && own.from_start &&
                        starts_from_slot<Spec>(n, has_initial_state);
    b.choose_unit(starts ? states + find_states<Spec>(n, b.head, e, state_stride, state_index,
                                                      output_state_index)
                                        .from
                         : nullptr);
  }
  begin_block(b);

  const auto find_kept = [&] {
    if constexpr (!kCheckpoints) {
      return NoCheckpoints{};
    } else {
      const auto passed = static_cast<uint32>(b.token - sequence.token);
      return find_checkpoints<Spec>(passed + static_cast<uint32>(b.overlap) * kChunk, n, e,
                                    seq_offsets, checkpoint_offsets)
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
    const StateSlots slots =
        find_states<Spec>(n, b.head, e, state_stride, state_index, output_state_index);
    StateWalk walk{b, (warp - 4) / 4 * kColumns, {}, {}, {}};
    const auto keep = [&](int row) { write_checkpoint<Spec>(walk, row, checkpoints, e); };
    if constexpr (INPLACE_STATE || INITIAL_STATE)
      if (own.from_start && starts_from_slot<Spec>(n, has_initial_state))
        walk.visit<V, STATE_V_FIRST>(
            [from = (INPLACE_STATE ? state : initial_state) + slots.from, factor = 1.0f / b.unit](
                int offset, float& x) { x = sm90::opaque(to_float(from[offset]) * factor); });
    if constexpr (INPLACE_STATE)
      if (!own.to_end) tell_slot_read(slots_read + n * e.HV + b.head);
    if (b.tokens > 0) walk_state(walk, e.scale * b.unit, {o, o_stride}, keep);
    if constexpr (INPLACE_STATE) {
      if (own.to_end) {
        await_counter(slots_read + n * e.HV + b.head, (shares - 1) * kTilesV * kStates * 4);
        walk.write<STATE_V_FIRST>(state + slots.to);
      }
    }
    if constexpr (FINAL_STATE) {
      if (own.to_end) walk.write<STATE_V_FIRST>(final_state + slots.to);
    }
  }
}
