// What a sequence does to a state, S -> M S + R: R the state at its end, from zeros or the given
// one, and with TRANSITION M.
#include "device/cuda/combine.cuh"
#include "device/cuda/state.cuh"

using Combine = SegmentCombine<Spec, TRANSITION ? ceil_div(K, BV) : 0>;

WYVERN_KERNEL(Combine::kThreads, 0) {
  if (block_row() >= e.N) return;
  Combine::summarize<false, SUMMARY_COLUMNS>(
      shared_memory(), segment_M, segment_R, seq_offsets, summary, e,
      [&](int sequence, int head, int k, int v) {
        if constexpr (!INITIAL_STATE) return 0.0f;
        const int64 start = (int64{sequence} * e.HV + head) * K * V;
        return to_float(initial_state[start + state_offset<STATE_V_FIRST, K, V>(k, v)]);
      });
}
