// kda_fwd_h_o: the state scan and the output of Kimi Delta Attention in one kernel. One block per
// sequence (or split of it), value head and BV columns of V. It loads W, U, qg, kg, Aqk and Gk and
// writes o, the final state and checkpoints; states between chunks and V' stay on chip.
#include "device/cuda/sm90/scheduler.cuh"
using Scheduler = sm90::WholeSequence<Spec>;
#include "forward/kda_fwd_h_o/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run<KdaFwdHO<Params>>({WYVERN_ARGUMENTS}); }
