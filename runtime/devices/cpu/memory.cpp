#include "runtime/devices/cpu/memory.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace wyvern {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

/// The number after `key` at the beginning of a line, or the file's only number when the key is
/// empty.
std::optional<std::uint64_t> number_in(const fs::path& file, std::string_view key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t digit = line.find_first_not_of(" \t", key.size());
    std::uint64_t number = 0;
    if (digit != std::string::npos &&
        std::from_chars(line.data() + digit, line.data() + line.size(), number).ec == std::errc())
      return number;
  }
  return {};
}

std::uint64_t on_machine(const fs::path& root) {
  const fs::path file = root / "proc/meminfo";
  const auto free = number_in(file, "MemAvailable:");
  if (!free) return kNoLimit;
  return (*free + number_in(file, "SwapFree:").value_or(0)) * 1024;
}

/// The names of one version of control groups.
struct Names {
  const char *mount, *limit, *used, *reclaimable;
};
constexpr Names kFirst{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                       "total_inactive_file "};
constexpr Names kSecond{"sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "};

/// The bytes that the group at `path` and all groups above it leave. A container may see its own
/// group as the root, and then the path does not exist.
std::uint64_t left_in(const fs::path& root, const Names& names, fs::path path) {
  std::uint64_t least = kNoLimit;
  for (path = path.relative_path();; path = path.parent_path()) {
    const fs::path group = root / names.mount / path;
    const auto limit = number_in(group / names.limit, "");
    const auto used = number_in(group / names.used, "");
    if (limit && used) {
      const auto files = number_in(group / "memory.stat", names.reclaimable).value_or(0);
      const std::uint64_t taken = *used - std::min(*used, files);
      least = std::min(least, *limit - std::min(*limit, taken));
    }
    if (path.empty()) return least;
  }
}

}  // namespace

std::uint64_t available_memory(const fs::path& root) {
  std::uint64_t least = on_machine(root);
  std::ifstream groups(root / "proc/self/cgroup");
  // "4:memory:/path" of the first version, "0::/path" of the second.
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = ',' + line.substr(first + 1, second - first - 1) + ',';
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") least = std::min(least, left_in(root, kSecond, path));
    if (controllers.find(",memory,") != std::string::npos)
      least = std::min(least, left_in(root, kFirst, path));
  }
  return least;
}

}  // namespace wyvern
