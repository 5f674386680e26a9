// delta_scans_segment: a segment's maps of states, S -> M S + R, and of their gradients,
// dS -> dM dS + dR. Where a segment decays any state below 2^-30, M is 0, R takes only its last
// chunks and dR only its first ones.
#include "device/cuda/sm90/scan_scheduler.cuh"
using Scheduler = sm90::SegmentMaps<Spec>;
#include "backward/delta_scans/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run_scans<DeltaScans<Params>>({WYVERN_ARGUMENTS}); }
