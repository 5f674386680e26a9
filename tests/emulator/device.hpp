// A device whose kernels are CUDA templates on the emulator and whose memory is the host's, so that
// whole operators run by the plans of a GPU where there is none.
#pragma once

#include <wyvern/runtime.hpp>

namespace wyvern::emulator {

/// A Hopper GPU as far as plans, legality and shapes of launches go. It loads no artifacts:
/// operators and stages come from prepare() below. Launches and default plans count with that many
/// multiprocessors; 0: with an architecture's facts alone.
Device open_emulated_device(int multiprocessors = 0);
bool is_emulated(const Device& device);

/// The operator by `plan`, or by the device's default plan, each kernel run by emulate(): every
/// other launch of a kernel with its last warps first.
Operator prepare(const Device& device, const Problem& problem);
Operator prepare(const Device& device, const Problem& problem, const Plan& plan);
/// One template, as Runtime::prepare_stage() does.
Stage prepare_stage(const Device& device, const PlanStep& step, const Problem& problem);

}  // namespace wyvern::emulator
