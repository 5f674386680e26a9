// delta_reverse_resume: the same over all segments at once, from the gradients of states that leave
// them.
#include "device/cuda/sm90/scan_scheduler.cuh"
using Scheduler = sm90::ReverseResumeScans<Spec>;
#include "backward/delta_scans/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run_scans<DeltaScans<Params>, false>({WYVERN_ARGUMENTS}); }
