// The state scan and the output of Kimi Delta Attention in one kernel, one block BV columns of V of
// one sequence and value head: neither states nor V' are written.
constexpr bool kQueries = true;
constexpr bool kCheckpoints = CHECKPOINTS, kDivided = CHECKPOINT_OFFSETS;

#include "device/cuda/chunk.cuh"
#include "device/cuda/share.cuh"
#include "device/state_slots.hpp"
#include "forward/kda_fwd_h_o/walk.cuh"

WYVERN_KERNEL(kThreads, 1) {
  Block b;
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % e.HV;
  b.heads = e.HV;
  const int sequences = static_cast<int>(e.N);
  int n = block_index() / kTilesV / e.HV;
  if constexpr (VARLEN)
    n = longest_first<kThreads>(n, sequences, seq_offsets, reinterpret_cast<int*>(b.shared));
  const Sequence sequence = locate_sequence<VARLEN, kChunk>(n, e, seq_offsets, chunk_offsets);
  if (is_null_sequence<Spec>(n, e, state_index, output_state_index)) {
    clear_output<kThreads>(
        TokenRows<DTYPE>{o, o_stride}.at(sequence.token, b.head * V + b.tile * BV), sequence.tokens,
        BV);
    return;
  }
  b.token = sequence.token;
  b.tokens = sequence.tokens;
  begin_block(b);

  const auto find_kept = [&] {
    if constexpr (!kCheckpoints) {
      return NoCheckpoints{};
    } else {
      return find_checkpoints<Spec>(0, n, e, seq_offsets, checkpoint_offsets);
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
      if (starts_from_slot<Spec>(n, has_initial_state))
        walk.visit<V, STATE_V_FIRST>([from = (INPLACE_STATE ? state : initial_state) + slots.from](
                                         int offset, float& x) { x = to_float(from[offset]); });
    if (b.tokens > 0) walk_state(walk, e.scale, {o, o_stride}, keep);
    if constexpr (INPLACE_STATE) walk.write<STATE_V_FIRST>(state + slots.to);
    if constexpr (FINAL_STATE) walk.write<STATE_V_FIRST>(final_state + slots.to);
  }
}
