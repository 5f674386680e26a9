// kda_resume: the forward pass over all segments at once, from the states before them. One block
// per segment, value head and BV columns of V.
#include "device/cuda/sm90/scheduler.cuh"
using Scheduler = sm90::SegmentResume<Spec>;
#include "forward/kda_forward/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run<KdaForward<Params>>({WYVERN_ARGUMENTS}); }
