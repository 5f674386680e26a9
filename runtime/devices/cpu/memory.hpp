// How much memory this process can have.
#pragma once

#include <cstdint>
#include <filesystem>

namespace wyvern {

/// Bytes that this process may still allocate: what the machine has free, swap included, and what
/// each control group above the process leaves of its limit. Linux overcommits and kills a process
/// that touches more than there is, so a large allocation asks here first. Other processes may take
/// memory meanwhile. Reads a few files below `root`; an unreadable file is no limit.
[[nodiscard]] std::uint64_t available_memory(const std::filesystem::path& root = "/");

}  // namespace wyvern
