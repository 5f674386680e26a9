// Care of a cache: is all of it as it was stored, does it stay within a size, is anything wrong
// with where and how it lies. Not for a hot path.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cache/cache.hpp"

namespace wyvern {

struct Verification {
  std::int64_t artifacts = 0, measurements = 0;  ///< looked at
  std::int64_t winners = 0;                      ///< those that answer, as stats() counts them
  std::int64_t superseded = 0;                   ///< winners of problems that were tuned again
  /// Rows that are not as they were stored, a sentence each: a row is named as in `wyvern cache
  /// list`.
  std::vector<std::string> damage;
};
/// Compares every row with its digest and every index with its table. Changes nothing. Throws
/// Error(kIo) where the cache cannot be read.
Verification verify_rows(const Cache& cache);

struct Collection {
  std::int64_t deleted = 0, deleted_bytes = 0;  ///< artifacts and their code
  std::int64_t bytes_before = 0, bytes = 0;     ///< of the file
};
/// Deletes artifacts until the file has at most `max_bytes`, and gives the space back: the least
/// recently used first (to the day), artifacts of winners' plans after all others. Winners and
/// measurements are never deleted. Throws Error(kIo) where the cache cannot be written.
Collection collect(Cache& cache, std::int64_t max_bytes);

/// Something about a cache that its user should know.
struct Finding {
  enum class Weight : std::uint8_t { good, note, warning, error };
  Weight weight = Weight::good;
  std::string check;    ///< one word: "owner", "damage"
  std::string message;  ///< one sentence
  std::string fix;      ///< how to fix it; empty for a note
};
std::string_view to_string(Finding::Weight weight) noexcept;

/// statfs's magic number of the file system that a path lies on (linux/magic.h); 0: not known.
std::uint32_t file_system_type(const std::filesystem::path& path);

/// Why this build cannot use a winner's plan; empty: it can.
using WinnerCheck = std::function<std::string(const WinnerRow&)>;

/// Checks directory, owner, file system, free space, version, damage, stale rows and winners that
/// this build cannot use, in this order, and does not open a file that it would have to repair.
/// `drivers`: of this machine's devices by their keys. `check` is asked of winners of these; null:
/// of none. `type_of` stands in for the machine's mounts in tests.
std::vector<Finding> diagnose(
    const std::filesystem::path& directory, const std::map<std::string, std::string>& drivers,
    const WinnerCheck& check = nullptr,
    const std::function<std::uint32_t(const std::filesystem::path&)>& type_of = file_system_type);

}  // namespace wyvern
