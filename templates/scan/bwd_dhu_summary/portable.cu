// The gradient of the state that enters a sequence.
#include "device/cuda/combine.cuh"
#include "device/cuda/state.cuh"

using Combine = SegmentCombine<Spec>;

WYVERN_KERNEL(Combine::kThreads, 0) {
  if (block_row() >= e.N) return;
  Combine::summarize<true, V>(shared_memory(), segment_dM, segment_dR, seq_offsets, dsummary, e,
                              [&](int sequence, int head, int k, int v) {
                                if constexpr (!FINAL_STATE) return 0.0f;
                                const int64 start = (int64{sequence} * e.HV + head) * K * V;
                                return dht[start + state_offset<STATE_V_FIRST, K, V>(k, v)];
                              });
}
