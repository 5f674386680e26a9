// Runs CUDA templates on the host, so that their logic is tested where there is no GPU.
//
// The template's own source is compiled by the host's C++ compiler with two files exchanged:
// device/cuda/ptx.cuh and device/cuda/sm90/ptx.cuh, for which ptx.cuh and sm90_ptx.cuh of this
// folder stand in. Blocks run one after another, each CUDA thread as a fiber; barriers and
// warp-wide instructions are meeting points, with the fragment layouts of the PTX ISA. What a GPU
// leaves to chance is made to fail here:
// * shared memory starts as NaNs and ends at an unmapped page;
// * the destination of an asynchronous copy is NaNs from its issue to the wait that completes it;
// * a warp runs until it must wait for others, in either order of warps;
// * TMA copies arrive when no thread can go on without, and their destination is NaNs until
//   then;
// * accumulators of wgmma are NaNs until the wait; its operands in shared memory are read at the
//   wait or at once;
// * lanes that meet in different instructions, or do not meet, are an error, and so is a deadlock.
// Clusters, the number of registers and the order of the two kinds of memory access (proxies) are
// not emulated.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "templates/template.hpp"

namespace wyvern::emulator {

/// Which warp goes first when several can.
enum class Schedule { first_warp, last_warp };

/// Launches the template once over the whole grid of its geometry. `arguments` are host pointers in
/// the order of its contract, null where absent; the template's tensor maps are made of them.
/// Throws std::runtime_error that says what the kernel did wrong, Error(kCompile) with the
/// compiler's message. Compiled kernels are kept in a temporary folder under the hash of their
/// source. Thread-safe.
void emulate(const Template& t, const Constants& constants, const Config& config, const Extents& e,
             std::span<void* const> arguments, Schedule schedule = Schedule::first_warp);

/// The same over a grid that another target's facts made, with the strides of strided tensors.
void emulate(const Template& t, const Constants& constants, const Config& config,
             const Geometry& geometry, const Extents& e, std::span<void* const> arguments,
             std::span<const std::int64_t> strides, Schedule schedule = Schedule::first_warp);

/// The same for a kernel of a test's own, given as the text of its file. The argument of a
/// TensorMap points at one.
void emulate(std::string_view source, const Geometry& geometry, const Extents& e,
             std::span<void* const> arguments, Schedule schedule = Schedule::first_warp);
/// That text with all that it includes, for CUDA's compiler.
std::string expand(std::string_view source);

}  // namespace wyvern::emulator
