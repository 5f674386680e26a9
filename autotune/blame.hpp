// Decides whether a failure was the config's, which is stored, or the machine's, which is not.
#pragma once

#include <wyvern/error.hpp>

#include <string>
#include <string_view>

#include "autotune/results.hpp"

namespace wyvern {

/// The status of a plan that failed to prepare or run. `on_cpu`: whether it ran on the CPU, which
/// refuses no kernel for its config, so that kUnavailable there means that the machine lacks a
/// resource.
Status blame(const Error& error, bool on_cpu);

/// Whether the text names a lack of descriptors, memory or room as the system or the CUDA driver
/// spells it.
bool names_shortage(std::string_view text);

/// Whether a process ended by that signal caused it itself, as with SIGSEGV. SIGKILL comes from
/// others: from a user, or from a system short of memory.
bool own_fault(int signal);

/// The resource that this process cannot get now ("file descriptors", "memory"); empty when there
/// is enough. It says nothing about a shortage that has passed.
std::string shortage();

}  // namespace wyvern
