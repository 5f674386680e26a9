// The states that enter segments.
#include "common/cuda/combine.cuh"
#include "common/cuda/state.cuh"

WYVERN_KERNEL(kThreads, 0)
(const float* segment_M, const float* segment_R, const STATE_DTYPE* initial_state,
 const int32* seq_offsets, float* segment_state, Extents e) {
  combine_segments<false>(
      segment_M, segment_R, seq_offsets, segment_state, e,
      [&](int sequence, int head, int k, int v) {
        if constexpr (!INITIAL_STATE) return 0.0f;
        const int64 start = (int64{sequence} * HV + head) * K * V;
        return to_float(initial_state[start + state_offset<STATE_V_FIRST, K, V>(k, v)]);
      });
}
