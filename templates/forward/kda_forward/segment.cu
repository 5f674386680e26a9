// kda_segment: a segment's map of states S -> M S + R. R is the final state from zeros, M the final
// state from the identity with v = 0. One block per segment, value head and BV columns of M or R.
// Where a segment decays any state below 2^-30, M is 0, and R takes only its last slices.
#include "device/cuda/sm90/scheduler.cuh"
using Scheduler = sm90::SegmentMap<Spec>;
#include "forward/kda_forward/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run<KdaForward<Params>>({WYVERN_ARGUMENTS}); }
