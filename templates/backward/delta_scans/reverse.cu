// delta_reverse: the reverse scan of whole sequences alone, where the forward pass has kept what
// the other one finds: for the gradients of states that leave chunks and dV.
#include "device/cuda/sm90/scan_scheduler.cuh"
using Scheduler = sm90::WholeReverseScans<Spec>;
#include "backward/delta_scans/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run_scans<DeltaScans<Params>, false>({WYVERN_ARGUMENTS}); }
