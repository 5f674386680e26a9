// kda_fwd_h_o_resume: the state scan and the output of all segments at once, from the states before
// them. One block per segment, value head and BV columns of V.
#include "device/cuda/sm90/scheduler.cuh"
using Scheduler = sm90::SegmentResume<Spec>;
#include "forward/kda_fwd_h_o/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run<KdaFwdHO<Params>>({WYVERN_ARGUMENTS}); }
