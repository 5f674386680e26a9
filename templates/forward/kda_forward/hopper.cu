// The whole forward pass of Kimi Delta Attention, one block BV columns of V of one sequence, or of
// a share of it, and value head: nothing but o and the final state is written.
constexpr bool kQueries = true;

#include "forward/kda_forward/walk.cuh"

/// log2 of a bound on how much longer a state can be after token `t` of a head than before it: the
/// spectral norm of (I - beta k k^T) diag(exp(g)) is at most max(exp(g)) max(1, |1 - beta |k|^2|).
/// In all lanes of a warp.
WYVERN_DEVICE float stretch(const Block& b, int64 t, const GateForm& form,
                            const TokenRows<const G_DTYPE>& g,
                            const TokenRows<const BETA_DTYPE>& beta,
                            const TokenRows<const DTYPE>& k) {
  const float rate = activate_beta<BETA_SIGMOID, NEG_EIGVAL>(beta.row(t)[b.head]);
  const G_DTYPE* const gates = g.row(t) + b.head * K;
  const DTYPE* const keys = k.row(t) + b.head / (HV / H) * K;
  const float* const bias = array_at<kLayout.bias>(b.shared);
  float most = bits_float(0xFF800000U);  // -inf
  float square = 0.0f;
#pragma unroll
  for (int channel = 0; channel < K; channel += 32) {
    const int i = channel + lane_index();
    most = maximum(most, form(to_float(gates[i]), bias[i]));
    const float x = to_float(keys[i]);
    square = fused_multiply_add(x, x, square);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    most = maximum(most, shuffle_xor(most, mask));
    square += shuffle_xor(square, mask);
  }
  if constexpr (QK_L2NORM) square = 1.0f;  // at most, and the bound grows with it
  const float kept = 1.0f - rate * square;
  const float grown = maximum(kept, -kept) - 1.0f;
  return most + (grown > 0.0f ? log_one_plus(grown) * kLog2E : 0.0f);
}

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
  // Blocks share out the sequence's chunks. Where states last so long that this would be slower,
  // two of them share out its columns instead; what is in front of the last share decides for all.
  const bool may_halve = kStates == 2 && shares > 1;
  const int all = ceil_div(sequence.tokens, kChunk);
  const auto stretch_before = [&](int last) {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < kRows; ++i)
      if (last - i >= 0)
        sum += stretch(b, sequence.token + last - i, form, {g, g_stride}, beta_rows, {k, k_stride});
    return lane_index() == 0 ? sum : 0.0f;
  };
  int warm = 0;
#pragma unroll 1
  for (int of = may_halve ? shares - 1 : share;; of = share) {
    const int first = static_cast<int>(int64{all} * of / shares);
    warm = 0;
    if (first > 0)
      warm = warm_up<kChunk, kThreads, kRows>(first, b.factors<kLayout.decay>(0), stretch_before);
    // A slice of 64 columns takes 0.8 of the time of one of 128.
    b.halves = may_halve && of == shares - 1 && 5 * (all - first + warm) > 4 * all;
    if (b.halves || of == share) break;
  }
  if (b.halves && share > 1) return;
  static_cast<SharedWalk&>(b) = share_out<kChunk>(sequence, b.halves ? 0 : share,
                                                  b.halves ? 1 : shares, [&](int) { return warm; });
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
    const int warpgroup = (warp - 1 - kHelpers) / 4;
    if (b.halves && warpgroup > 0) return;
    sm90::raise_registers<kStateRegisters>();
    const int64 state_start = (int64{b.sequence} * HV + b.head) * K * V;
    StateWalk walk{b, (b.halves ? share : warpgroup) * kColumns, {}, {}, {}, {}, {}};
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
