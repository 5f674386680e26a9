// What a segment does to a state, S -> M S + R, from k, v, beta and g as they were given: R is what
// the walk makes of a state of zeros, M what it makes of the identity where v is 0. One block BV
// columns of M or of R of one segment and value head. Where gates take any state to less than 2^-30
// of its length in the segment's last tokens, M is 0 and the walk to R takes no more than those.
constexpr bool kQueries = false;
constexpr bool kCheckpoints = false, kDivided = false;

#include "device/cuda/segment.cuh"
#include "forward/delta_forward/block.cuh"

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
  b.chunks = SEG;
  GateForm form{e.gate_floor, 0.0f, 0.0f};
  if constexpr (GATE_IN_KERNEL) {
    form.A_log = A_log[b.head];
    if constexpr (HAS_DT_BIAS) form.bias = dt_bias[b.head];
  }
  const TokenRows<const G_DTYPE> g_rows{g, g_stride};
  const TokenRows<const BETA_DTYPE> beta_rows{beta, beta_stride};
  if constexpr (SCALAR_GATE) {
    const int counting = warm_up<kRows, kThreads, 32>(SEG, b.factors<kLayout.G>(0), [&](int last) {
      const int t = last - lane_index();
      return t < 0 ? 0.0f
                   : stretch_of(b.token + t, b.head, form, g_rows, beta_rows,
                                {k + b.key_head * K, k_stride});
    });
    if (counting < SEG) {
      if (b.without_values) {
        write_no_M<K, BV, kThreads>(share_M + int64{slot} * K * K, b.tile * BV);
        return;
      }
      b.token += (SEG - counting) * kRows;
      b.chunks = counting;
    }
  }
  b.tokens = b.chunks * kRows;
  begin_block(b);

  const ScalarRows rows{g_rows, beta_rows};
  const auto no_kept = [] { return NoCheckpoints{}; };
  run_block(b, form, e.scale, rows, k_map, k_map, v_map, 0, no_kept, [&](auto& walker) {
    if (b.without_values)
      walker.template visit<K, false>(
          [](int offset, float& x) { x = offset / K == offset % K ? 1.0f : 0.0f; });
    walk(walker);
    if (b.without_values)
      walker.template visit<K, false>([to = share_M + int64{slot} * K * K](int offset, float& x) {
        to[offset] = element_of_M(x);
      });
    else
      walker.template visit<V, false>(
          [to = share_R + int64{slot} * K * V](int offset, float& x) { to[offset] = x; });
  });
}
