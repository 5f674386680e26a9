// delta_scans_resume: both scans over all segments at once, from the states that enter them and the
// gradients of states that leave them.
#include "device/cuda/sm90/scan_scheduler.cuh"
using Scheduler = sm90::ResumeScans<Spec>;
#include "backward/delta_scans/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run_scans<DeltaScans<Params>>({WYVERN_ARGUMENTS}); }
