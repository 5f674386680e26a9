// A device whose kernels are CUDA templates on the emulator and whose memory is the host's, so that
// whole operators run by the plans of a GPU where there is none.
#pragma once

#include <wyvern/runtime.hpp>

namespace wyvern::emulator {

/// A Hopper GPU as far as plans, legality and shapes of launches go. It loads no artifacts:
/// operators come from prepare() below. Launches and default plans count with that many
/// multiprocessors; 0: with an architecture's facts alone.
Device open_emulated_device(int multiprocessors = 0);

/// The operator by `plan`, or by the device's default plan, each kernel run by emulate().
Operator prepare(const Device& device, const Problem& problem);
Operator prepare(const Device& device, const Problem& problem, const Plan& plan);

}  // namespace wyvern::emulator
