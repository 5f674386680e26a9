// What a segment does to a state, S -> M S + R, from W, U and the decayed rows of k: R is what the
// walk makes of a state of zeros, M what it makes of the identity where U is 0. One block BV
// columns of M or of R of one segment and value head.
constexpr bool kQueries = false;
constexpr bool kCheckpoints = false, kDivided = false;

#include "device/cuda/segment.cuh"
#include "forward/kda_fwd_h_o/walk.cuh"

constexpr int kTilesK = K / BV;
/// fp16 has digits enough for one.
constexpr int kPartsOfM = sm90::kIsBf16<DTYPE> ? 2 : 1;

WYVERN_KERNEL(kThreads, 1) {
  const int tile = block_index() % (kTilesK + kTilesV);
  const int place = block_index() / (kTilesK + kTilesV) / e.HV;
  const Segment segment = locate_segment<VARLEN, SEG * BT, true>(place, e, seq_offsets);
  if (!segment.used || segment.last) return;
  Block b;
  b.shared = sm90::swizzled_memory();
  b.head = block_index() / (kTilesK + kTilesV) % e.HV;
  b.heads = e.HV;
  b.without_values = tile < kTilesK;
  b.tile = b.without_values ? tile : tile - kTilesK;
  b.token = segment.token;
  b.tokens = segment.tokens;
  begin_block(b);

  const int warp = sm90::uniform(warp_index());
  if (warp < 4) {
    begin_bringing();
    if (warp > 0 && warp <= kConverters)
      convert_chunks(b, warp - 1, nullptr, Gk + (b.token * e.HV + b.head) * K, NoCheckpoints{}, {});
    else if (thread_index() == 0)
      bring_chunks(b, w_map, w_map, kg_map, u_map);
  } else {
    begin_walking();
    StateWalk walk{b, (warp - 4) / 4 * kColumns, {}, {}, {}};
    const int64 slot = int64{segment.slot} * e.HV + b.head;
    if (b.without_values) {
      walk.visit<K, false>(
          [](int offset, float& x) { x = offset / K == offset % K ? 1.0f : 0.0f; });
      walk_state_alone<kPartsOfM>(walk);
      walk.visit<K, false>(
          [to = segment_M + slot * K * K](int offset, float& x) { to[offset] = element_of_M(x); });
    } else {
      walk_state_alone<1>(walk);
      walk.visit<V, false>([to = segment_R + slot * K * V](int offset, float& x) {
        to[offset] = x * kValueUnit<Spec>;
      });
    }
  }
}
