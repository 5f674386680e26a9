// kda_scans_summary: the reverse scan of kda_scans alone, for the gradients of the states that
// enter sequences. Nothing is written for chunks.
#include "device/cuda/sm90/scan_scheduler.cuh"
using Scheduler = sm90::SummaryScans<Spec>;
#include "backward/kda_scans/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) {
  sm90::run_scans<KdaScans<Params>, /*Forward=*/false>({WYVERN_ARGUMENTS});
}
