// Rescues the readable rows of a damaged wyvern.db.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>

namespace wyvern {

struct Repair {
  std::int64_t rows = 0;       ///< carried over into the new file
  std::filesystem::path kept;  ///< the damaged file, under its new name
};

/// Replaces a damaged `file` by a new one that holds every row that can still be read, and keeps
/// the damaged one beside it as wyvern.db.corrupt-<UTC time>. No connection of this process may be
/// open on it. Safe when many processes do it at once: one works, the others wait up to `patience`
/// and find a healthy file, for which the answer is empty. Throws DatabaseError when it cannot be
/// done now (no space, still locked) and ForeignDatabase when the file is not this program's to
/// touch; the file is then as it was.
std::optional<Repair> repair_database(const std::filesystem::path& file,
                                      std::chrono::milliseconds patience);

}  // namespace wyvern
