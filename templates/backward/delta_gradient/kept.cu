// delta_gradient_kept: the same from the states and V' that the forward pass has kept.
constexpr bool kKept = true;
#include "backward/delta_gradient/mainloop.cuh"

WYVERN_KERNEL(kThreads, 1) { sm90::run<DeltaGradient<Params>>({WYVERN_ARGUMENTS}); }
