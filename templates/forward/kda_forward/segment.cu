// What a segment does to a state, S -> M S + R, from k, v, beta and g as they were given: R is what
// the walk makes of a state of zeros, M what it makes of the identity where v is 0. One block BV
// columns of M or of R of one segment and value head. Where the segment's last tokens take any
// state to less than 2^-30 of its length, M is 0 and the walk to R takes no more than those.
constexpr bool kQueries = false;
constexpr bool kCheckpoints = false;

#include "device/cuda/segment.cuh"
#include "forward/kda_forward/fading.cuh"

constexpr int kTilesK = K / BV;

WYVERN_KERNEL(kThreads, 1) {
  const int tile = block_index() % (kTilesK + kTilesV);
  const int place = block_index() / (kTilesK + kTilesV);  // of a followed segment and value head
  const Segment segment = locate_segment<VARLEN, SEG * BT, true>(place / e.HV, e, seq_offsets);
  if (!segment.used || segment.last) return;
  Block b{};
  b.shared = sm90::swizzled_memory();
  b.head = place % e.HV;
  b.key_head = e.key_head(b.head);
  const int slot = segment.slot * e.HV + b.head;
  b.without_values = tile < kTilesK;
  b.tile = b.without_values ? tile : tile - kTilesK;
  b.token = segment.token;
  b.tokens = segment.tokens;
  const GateForm form(e, HAS_A_LOG ? A_log[b.head] : 0.0f);
  bring_bias(b, form, dt_bias);
  const TokenRows<const BETA_DTYPE> beta_rows{beta, beta_stride};
  const int fading = fading_tokens(b, b.token + b.tokens, b.tokens, b.factors<kLayout.decay>(0),
                                   form, {g, g_stride}, beta_rows, {k, k_stride});
  if (fading > 0) {
    if (b.without_values) {
      write_no_M<K, BV, kThreads>(share_M + int64{slot} * K * K, b.tile * BV);
      return;
    }
    b.token += b.tokens - fading;
    b.tokens = fading;
  }
  begin_block(b);

  const int warp = sm90::uniform(warp_index());
  if (warp < kFrontWarps) {
    sm90::lower_registers<kHelperRegisters>();
    if (warp > 0)
      prepare_slices(b, warp - 1, e.scale, form, beta_rows);
    else if (lane_index() == 0)
      bring_slices(b, k_map, k_map, v_map, g_map, NoCheckpoints{});
  } else {
    sm90::raise_registers<kStateRegisters>();
    StateWalk walk{b, (warp - kFrontWarps) / 4 * kColumns, {}, {}, {}, {}, {}};
    const int column = b.tile * BV + walk.column;
    if (b.without_values)
      sm90::visit_state<K, false>(walk.state, column, [](int offset, float& x) {
        x = offset / K == offset % K ? 1.0f : 0.0f;
      });
    walk_state_alone(walk);
    if (b.without_values)
      sm90::visit_state<K, false>(walk.state, column,
                                  [to = share_M + int64{slot} * K * K](int offset, float& x) {
                                    to[offset] = element_of_M(x);
                                  });
    else
      sm90::visit_state<V, false>(
          walk.state, column,
          [to = share_R + int64{slot} * K * V](int offset, float& x) { to[offset] = x; });
  }
}
