// The states that enter segments.
#include "device/cuda/combine.cuh"
#include "device/cuda/state.cuh"

using Combine = SegmentCombine<Spec>;

WYVERN_KERNEL(Combine::kThreads, 0) {
  Combine::walk<false>(
      shared_memory(), segment_M, segment_R, seq_offsets, segment_state, e,
      [&](int sequence, int head, int k, int v) {
        if constexpr (!INITIAL_STATE) return 0.0f;
        const int64 start = (int64{sequence} * HV + head) * K * V;
        return to_float(initial_state[start + state_offset<STATE_V_FIRST, K, V>(k, v)]);
      });
}
