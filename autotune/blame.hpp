// Whose failure it was: the config's, which is remembered, or the machine's, which says nothing of
// the config.
#pragma once

#include <wyvern/error.hpp>

#include <string>
#include <string_view>

#include "autotune/results.hpp"

namespace wyvern {

/// What a failure to prepare or run a plan makes of it. `on_cpu`: where it was to run. A CPU
/// refuses no kernel for its config, so that what cannot be had there is the machine's lack.
Status blame(const Error& error, bool on_cpu);

/// Whether the text names a lack of descriptors, memory or room as the system or the CUDA driver
/// spells it.
bool names_shortage(std::string_view text);

/// Whether a process ended by that signal did so of itself, as SIGSEGV tells. SIGKILL comes from
/// others: from a user, or from a system short of memory.
bool own_fault(int signal);

/// What this process could not get now if it asked for it ("file descriptors", "memory"); empty
/// when there is enough. Of a failure in the meantime nothing can be said.
std::string shortage();

}  // namespace wyvern
