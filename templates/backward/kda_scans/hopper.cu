// kda_scans: both scans of the backward pass of Kimi Delta Attention over the prepared chunks of
// whole sequences: forward for the states that enter chunks and Z, in reverse for the gradients of
// states that leave chunks and dV.
#include "device/cuda/sm90/scan_scheduler.cuh"
using Scheduler = sm90::WholeScans<Spec>;
#include "backward/kda_scans/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run_scans<KdaScans<Params>>({WYVERN_ARGUMENTS}); }
