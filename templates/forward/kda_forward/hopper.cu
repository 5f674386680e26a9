// kda_forward: the whole forward pass of Kimi Delta Attention in one kernel. One block per sequence
// (or split of it), value head and BV columns of V. It loads q, k, v, beta and g and writes o, the
// final state and checkpoints; the state stays on chip.
#include "device/cuda/sm90/scheduler.cuh"
using Scheduler = sm90::WholeSequence<Spec>;
#include "forward/kda_forward/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run<KdaForward<Params>>({WYVERN_ARGUMENTS}); }
