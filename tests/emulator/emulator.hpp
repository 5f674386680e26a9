// Runs CUDA templates on the host, so that their logic is tested where there is no GPU.
//
// The template's own source is compiled by the host's C++ compiler with one file exchanged:
// device/cuda/ptx.cuh, for which ptx.cuh of this folder stands in. Blocks run one after another,
// each CUDA thread as a fiber; barriers and warp-wide instructions are meeting points, with the
// fragment layouts of the PTX ISA. What a GPU leaves to chance is made to fail here:
// * shared memory starts as NaNs and ends at an unmapped page;
// * the destination of an asynchronous copy is NaNs from its issue to the wait that completes it;
// * a warp runs until it must wait for others, in either order of warps;
// * lanes that meet in different instructions, or do not meet, are an error.
#pragma once

#include <span>
#include <string>

#include "templates/template.hpp"

namespace wyvern::emulator {

/// Which warp goes first when several can.
enum class Schedule { first_warp, last_warp };

/// Launches the template once over the whole grid of its geometry. `arguments` are host pointers in
/// the order of its contract, null where absent. Throws std::runtime_error that says what the
/// kernel did wrong, Error(kCompile) with the compiler's message. Compiled kernels are kept in a
/// temporary folder under the hash of their source. Thread-safe.
void emulate(const Template& t, const Constants& constants, const Config& config, const Extents& e,
             std::span<void* const> arguments, Schedule schedule = Schedule::first_warp);

}  // namespace wyvern::emulator
