// delta_gradient: all gradients of chunks but v's, for the delta rule with one gate a head or none,
// from the states on both sides of each chunk.
constexpr bool kKept = false;
#include "backward/delta_gradient/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run<DeltaGradient<Params>>({WYVERN_ARGUMENTS}); }
