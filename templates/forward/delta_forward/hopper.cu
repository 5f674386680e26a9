// The whole forward pass of the delta rule with one gate a head or none, one block BV columns
// of V of one sequence, or of a share of it, and value head. The state stays on chip: of q, k, v,
// beta and g nothing but they themselves is read, and nothing but o, the final state and
// checkpoints written.
constexpr bool kQueries = true;
constexpr bool kCheckpoints = CHECKPOINTS, kDivided = CHECKPOINT_OFFSETS;

#include "device/state_slots.hpp"
#include "forward/delta_forward/block.cuh"

/// Whether one of the blocks that share a sequence waits till the others have read its slot.
constexpr bool kWaits = INPLACE_STATE && SCALAR_GATE;

WYVERN_KERNEL(kThreads, 1) {
  Block b{};
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % e.HV;
  b.key_head = e.key_head(b.head);
  const int sequences = static_cast<int>(e.N);
  b.sequence = block_index() / (kTilesV * e.HV) % sequences;
  if constexpr (VARLEN)
    b.sequence = longest_first<kThreads>(b.sequence, sequences, seq_offsets,
                                         reinterpret_cast<int*>(b.shared));
  const Sequence sequence =
      locate_sequence<VARLEN, kRows>(b.sequence, e, seq_offsets, chunk_offsets);
  if (is_null_sequence<Spec>(b.sequence, e, state_index, output_state_index)) {
    if (block_index() < kTilesV * e.HV * sequences)
      clear_output<kThreads>(
          TokenRows<DTYPE>{o, o_stride}.at(sequence.token, b.head * V + b.tile * BV),
          sequence.tokens, BV);
    return;
  }
  GateForm form{e.gate_floor, 0.0f, 0.0f};
  if constexpr (GATE_IN_KERNEL) {
    form.A_log = A_log[b.head];
    if constexpr (HAS_DT_BIAS) form.bias = dt_bias[b.head];
  }

  const TokenRows<const G_DTYPE> g_rows{g, g_stride};
  const TokenRows<const BETA_DTYPE> beta_rows{beta, beta_stride};

  // Without a gate older states always count.
  const int chains = kTilesV * e.HV * sequences;
  const int shares = SCALAR_GATE ? block_count() / chains : 1;
  // The last shares come first: where they have the whole sequence to walk through, the others have
  // less. In place the last one waits for the others, so that it comes after them.
  const int turn = block_index() / chains;
  const int share = INPLACE_STATE ? turn : shares - 1 - turn;
  // Two blocks of a sequence share out its chunks, or, where states last so long that this is
  // faster, its columns: what both see in front of the second share decides.
  const bool may_halve = kWalkers == 2 && shares == 2;
  const int all = ceil_div(sequence.tokens, kRows);
  const int first = static_cast<int>(int64{all} * (may_halve ? 1 : share) / shares);
  int warm = 0;
  if (SCALAR_GATE && first > 0)
    warm = warm_up<kRows, kThreads, 32>(first, b.factors<kLayout.G>(0), [&](int last) {
      const int t = last - lane_index();
      return t < 0 ? 0.0f
                   : stretch_of(sequence.token + t, b.head, form, g_rows, beta_rows,
                                {k + b.key_head * K, k_stride});
    });
  // A chunk of 64 columns takes about 0.75 of the time of one of 128.
  b.halves = may_halve && 4 * (all - first + warm) > 3 * all;
  static_cast<SharedWalk&>(b) = share_out<kRows>(sequence, b.halves ? 0 : share,
                                                 b.halves ? 1 : shares, [&](int) { return warm; });
  if (b.chunks == 0 && !b.to_end) {
    if constexpr (kWaits)
      if (warp_index() < 4 * kWalkers) tell_slot_read(slots_read + b.sequence * e.HV + b.head);
    return;
  }
  begin_block(b);

  const auto find_kept = [&] {
    if constexpr (!kCheckpoints) {
      return NoCheckpoints{};
    } else {
      const auto passed = static_cast<uint32>(b.token - sequence.token);
      return find_checkpoints<Spec>(passed + static_cast<uint32>(b.warm) * kRows, b.sequence, e,
                                    seq_offsets, checkpoint_offsets)
          .counted_from(passed);
    }
  };
  const auto keep = [&](auto& walker, int row, float factor) {
    write_checkpoint<Spec>(walker, row, factor, checkpoints, e);
  };
  run_block(b, form, e.scale, {g_rows, beta_rows}, q_map, k_map, v_map, b.halves ? share : 0,
            find_kept, [&](auto& walker) {
              // Computed where they are used: in between registers are few.
              const auto slots = [&] {
                const Block copy = recalled(b);
                return find_states<Spec>(copy.sequence, copy.head, e, state_stride, state_index,
                                         output_state_index);
              };
              if constexpr (INPLACE_STATE || INITIAL_STATE) {
                if (b.from_start && starts_from_slot<Spec>(recalled(b).sequence, has_initial_state))
                  walker.template visit<V, STATE_V_FIRST>(
                      [from = (INPLACE_STATE ? state : initial_state) + slots().from](
                          int offset, float& x) { x = to_float(from[offset]); });
              }
              if constexpr (kWaits) {
                const Block copy = recalled(b);
                if (!copy.to_end) tell_slot_read(slots_read + copy.sequence * e.HV + copy.head);
              }
              if (b.chunks > 0) walk(walker, o_map, {o, o_stride}, keep);
              if constexpr (INPLACE_STATE) {
                const Block copy = recalled(b);
                if (copy.to_end) {
                  if (kWaits && !copy.halves)
                    await_counter(slots_read + copy.sequence * e.HV + copy.head,
                                  (block_count() / (kTilesV * e.HV * static_cast<int>(e.N)) - 1) *
                                      kTilesV * kWalkers * 4);
                  walker.template visit<V, STATE_V_FIRST>(
                      [to = state + slots().to](int offset, float& x) {
                        to[offset] = from_float<STATE_DTYPE>(x);
                      });
                }
              }
              if constexpr (FINAL_STATE) {
                if (recalled(b).to_end)
                  walker.template visit<V, STATE_V_FIRST>(
                      [to = final_state + slots().to](int offset, float& x) { to[offset] = x; });
              }
              if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
            });
}
