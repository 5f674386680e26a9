// Whose the cache's files are. Code found in them runs in this process, so whoever can write them
// can run code here.
#pragma once

#include <filesystem>
#include <string>

namespace wyvern {

struct Trust {
  /// Why the files must not be used, as one sentence without its full stop; empty when they may.
  std::string refusal{};
  /// The files belong to the user that $WYVERN_CACHE_OWNER names: read, never write them.
  bool read_only = false;
};

/// Checks `file` (wyvern.db), the files beside it that begin with its name, and its directory. They
/// may be used if only this user, root and the user named by $WYVERN_CACHE_OWNER (a name or a
/// number) can have written them. Refused are a directory or file of another user, one that group
/// or others may write, a symbolic link instead of either, and a directory above that everybody may
/// change. A missing file is not refused.
[[nodiscard]] Trust trust_in(const std::filesystem::path& file);

}  // namespace wyvern
