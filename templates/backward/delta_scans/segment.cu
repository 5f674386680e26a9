// What a segment does to a state, S -> M S + R, and to a state's gradient, dS -> dM dS + dR, from
// what is given: R and dR are what the walks make of zeros, M what the forward one makes of the
// identity where v is 0, and dM = M^T. One block BV columns of M, R or dR of one segment and value
// head. Where gates take any state to less than 2^-30 of its length in a segment's last tokens, M
// is 0 and the walk to R takes no more than those; and the walk to dR no more than such first
// tokens.
constexpr bool kWrites = false;

#include "backward/delta_scans/block.cuh"
#include "device/cuda/segment.cuh"

constexpr int kTilesK = K / BV;

WYVERN_KERNEL(kThreads, 1) {
  constexpr int kTiles = 2 * kTilesV + kTilesK;
  const int tile = block_index() % kTiles;
  const int slot = block_index() / kTiles;  // of a segment and value head
  const int head = slot % e.HV;
  const Segment segment = locate_segment<VARLEN, SEG * BT>(slot / e.HV, e, seq_offsets);
  const bool first = segment.index == 0;
  if (!segment.used || (first && segment.last)) return;
  const bool reverse = tile < kTilesV;
  const bool of_M = tile >= 2 * kTilesV;
  if (!of_M && (reverse ? first : segment.last)) return;
  unsigned char* const shared = sm90::swizzled_memory();
  const auto gate = ScalarGate::of_head(e, A_log, dt_bias, head);
  const ScalarRows rows{{g, g_stride}, {beta, beta_stride}};
  const int chunks = ceil_div(segment.tokens, kRows);
  int counting = chunks;
  if constexpr (SCALAR_GATE)
    counting =
        count_overlap<kRows, kThreads, 32>(chunks, array_at<kLayout.G>(shared), [&](int last) {
          const int t = reverse ? chunks * kRows - 1 - last + lane_index() : last - lane_index();
          if (t < 0 || t >= segment.tokens) return 0.0f;
          return sm90::stretch_of<Spec>(segment.token + t, head, gate, rows,
                                        {k + e.key_head(head) * K, k_stride});
        });
  if (of_M && counting < chunks) {
    const int from = (tile - 2 * kTilesV) * BV;
    if (!segment.last) write_no_M<K, BV, kThreads>(share_M + int64{slot} * K * K, from);
    if (!first) write_no_M<K, BV, kThreads>(share_dM + int64{slot} * K * K, from);
    return;
  }
  const auto block_of = [&](auto b) {
    b.shared = shared + sm90::opaque(0);  // or addresses from above stay in registers
    const int skipped = reverse ? 0 : (chunks - counting) * kRows;
    b.token = segment.token + skipped;
    b.slot = slot;
    b.tokens = smaller(segment.tokens - skipped, counting * kRows);
    b.chunks = counting;
    b.head = head;
    b.key_head = e.key_head(head);
    b.heads = e.HV;
    b.tile = of_M ? tile - 2 * kTilesV : tile % kTilesV;
    b.without_values = of_M;
    b.first = first;
    b.last = segment.last;
    return b;
  };
  if (reverse) {
    const auto b = block_of(Block<true>{});
    run_block(b, gate, e.scale, rows, q_map, k_map, do_map, [&](int consumer) {
      Reverse own{{b, consumer, {}, {}}};
      own.walk(k_map, k_map, nullptr);
      own.visit<V, false>(
          [to = share_dR + recalled(b).slot * K * V](int offset, float& x) { to[offset] = x; });
    });
  } else {
    const auto b = block_of(Block<false>{});
    run_block(b, gate, e.scale, rows, q_map, k_map, v_map, [&](int consumer) {
      Forward own{{b, consumer, {}, {}}};
      if (recalled(b).without_values)
        own.visit<K, false>(
            [](int offset, float& x) { x = offset / K == offset % K ? 1.0f : 0.0f; });
      own.walk(k_map, k_map);
      const auto copy = recalled(b);
      if (!copy.without_values) {
        own.visit<V, false>(
            [to = share_R + copy.slot * K * V](int offset, float& x) { to[offset] = x; });
        return;
      }
      if (!copy.last)
        own.visit<K, false>([to = share_M + copy.slot * K * K](int offset, float& x) {
          to[offset] = element_of_M(x);
        });
      if (!recalled(b).first)
        own.visit<K, true>([to = share_dM + recalled(b).slot * K * K](int offset, float& x) {
          to[offset] = element_of_M(x);
        });
    });
  }
}
