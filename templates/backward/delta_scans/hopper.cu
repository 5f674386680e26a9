// delta_scans: both scans of the backward pass over the chunks of whole sequences: forward for the
// states that enter chunks and Z, in reverse for the gradients of states that leave chunks and dV.
#include "device/cuda/sm90/scan_scheduler.cuh"
using Scheduler = sm90::WholeScans<Spec>;
#include "backward/delta_scans/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run_scans<DeltaScans<Params>>({WYVERN_ARGUMENTS}); }
