// How much memory this process can have.
#pragma once

#include <cstdint>
#include <filesystem>

namespace wyvern {

/// Bytes that this process may still take: what the machine has free, swap included, and what each
/// control group above the process leaves of its limit. The system promises any amount and kills
/// who touches more than there is, so who needs much has to ask before. What others take meanwhile
/// nobody knows. Reads a few files below `root`; what cannot be read is no limit.
[[nodiscard]] std::uint64_t available_memory(const std::filesystem::path& root = "/");

}  // namespace wyvern
