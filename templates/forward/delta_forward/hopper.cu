// The whole forward pass of the delta rule with one gate a head or none, one block BV columns
// of V of one sequence, or of a share of it, and value head. The state stays on chip: of q, k, v,
// beta and g nothing but they themselves is read, and nothing but o and the final state written.
constexpr bool kQueries = true;

#include "forward/delta_forward/block.cuh"

WYVERN_KERNEL(kThreads, 1) {
  Block b{};
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % HV;
  const int sequences = static_cast<int>(e.N);
  b.sequence = block_index() / kTilesV / HV % sequences;
  if constexpr (VARLEN)
    b.sequence = longest_first<kThreads>(b.sequence, sequences, seq_offsets,
                                         reinterpret_cast<int*>(b.shared));
  const Sequence sequence =
      locate_sequence<VARLEN, kRows>(b.sequence, e, seq_offsets, chunk_offsets);
  GateForm form{e.gate_floor, 0.0f, 0.0f};
  if constexpr (GATE_IN_KERNEL) {
    form.A_log = A_log[b.head];
    if constexpr (HAS_DT_BIAS) form.bias = dt_bias[b.head];
  }

  const TokenRows<const G_DTYPE> g_rows{g, g_stride};
  const TokenRows<const BETA_DTYPE> beta_rows{beta, beta_stride};

  // Without a gate older states always count.
  const int shares = SCALAR_GATE ? block_count() / (kTilesV * HV * sequences) : 1;
  const int share = shares - 1 - block_index() / (kTilesV * HV * sequences);
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
                   : stretch_of(sequence.token + t, b.head, form, g_rows, beta_rows, {k, k_stride});
    });
  // A chunk of 64 columns takes about 0.75 of the time of one of 128.
  b.halves = may_halve && 4 * (all - first + warm) > 3 * all;
  static_cast<SharedWalk&>(b) = share_out<kRows>(sequence, b.halves ? 0 : share,
                                                 b.halves ? 1 : shares, [&](int) { return warm; });
  if (b.chunks == 0 && !b.to_end) return;
  begin_block(b);

  run_block(b, form, e.scale, {g_rows, beta_rows}, q_map, k_map, v_map, b.halves ? share : 0,
            [&](auto& walker) {
              // Computed where it is used: in between registers are few.
              const auto state_start = [&] {
                const Block copy = recalled(b);
                return (int64{copy.sequence} * HV + copy.head) * K * V;
              };
              if constexpr (INITIAL_STATE) {
                if (b.from_start)
                  walker.template visit<V, STATE_V_FIRST>(
                      [from = initial_state + state_start()](int offset, float& x) {
                        x = to_float(from[offset]);
                      });
              }
              if (b.chunks > 0) walk(walker, o_map, {o, o_stride});
              if constexpr (FINAL_STATE) {
                if (recalled(b).to_end)
                  walker.template visit<V, STATE_V_FIRST>(
                      [to = final_state + state_start()](int offset, float& x) { to[offset] = x; });
              }
              if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
            });
}
