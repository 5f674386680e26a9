// fwd_h_segment: a segment's map of states S -> M S + R. R is the final state from zeros, M the
// final state from the identity with U = 0. One block per segment, value head and BV columns of M
// or R.
#include "device/cuda/sm90/scheduler.cuh"
using Scheduler = sm90::SegmentMap<Spec>;
#include "forward/kda_fwd_h_o/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run<KdaFwdHO<Params>>({WYVERN_ARGUMENTS}); }
