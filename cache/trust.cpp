#include "cache/trust.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <system_error>

#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

namespace wyvern {
namespace {

namespace fs = std::filesystem;

constexpr mode_t kKind = S_IFMT;
constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

constexpr const char* kOwnDirectory = "set WYVERN_CACHE_DIR to a directory that only you can write";

/// The user of this name or number; nothing where there is none.
std::optional<uid_t> user_of(std::string_view text) {
  uid_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size()) return number;
  std::array<char, 16384> buffer{};
  passwd entry{};
  passwd* found = nullptr;
  ::getpwnam_r(std::string(text).c_str(), &entry, buffer.data(), buffer.size(), &found);
  return found != nullptr ? std::optional(entry.pw_uid) : std::nullopt;
}

/// The users whose files are used beside one's own. Root's always are: it needs no cache to run
/// code in any process.
struct Owners {
  std::optional<uid_t> trusted;  ///< named by $WYVERN_CACHE_OWNER

  bool has(uid_t user) const {
    return user == ::geteuid() || user == 0 || (trusted && user == *trusted);
  }
};

std::string refusal(std::string_view fault, std::string_view remedy) {
  return fmt::format("{}, so nothing is cached, since code is run from the cache: {}", fault,
                     remedy);
}

/// Why a file or directory of this kind is refused; or empty.
std::string refusal_of(const std::string& path, const struct stat& info, mode_t kind,
                       const Owners& owners) {
  const char* what = kind == S_IFDIR ? "directory" : "file";
  const std::string subject = fmt::format("the cache's {} {}", what, path);
  if ((info.st_mode & kKind) == S_IFLNK) {
    return refusal(subject + " is a symbolic link",
                   "set WYVERN_CACHE_DIR to the directory that is meant");
  }
  if ((info.st_mode & kKind) != kind) {
    return refusal(fmt::format("{} is not a {}", subject, what),
                   fmt::format("remove it, or {}", kOwnDirectory));
  }
  if (!owners.has(info.st_uid)) {
    return refusal(fmt::format("{} belongs to another user ({})", subject, info.st_uid),
                   fmt::format("{}, or WYVERN_CACHE_OWNER={} if you trust that user", kOwnDirectory,
                               info.st_uid));
  }
  if ((info.st_mode & kOthersWrite) != 0) {
    return refusal(fmt::format("{} may be written by its group or by others (mode {:04o})", subject,
                               info.st_mode & 07777),
                   fmt::format("chmod go-w {}, or {}", path, kOwnDirectory));
  }
  return {};
}

/// The nearest directory above whose entries any user may replace.
fs::path open_to_all(const fs::path& directory) {
  std::error_code error;
  const fs::path resolved = fs::canonical(directory, error);
  if (error) return {};
  for (fs::path above = resolved; above != above.parent_path();) {
    above = above.parent_path();
    struct stat info{};
    if (::stat(above.c_str(), &info) != 0) continue;
    if ((info.st_mode & S_IWOTH) != 0 && (info.st_mode & S_ISVTX) == 0) return above;
  }
  return {};
}

/// An open directory.
class Descriptor {
 public:
  explicit Descriptor(const fs::path& path)
      : number_(::open(path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC)) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

}  // namespace

Trust trust_in(const fs::path& file) {
  Owners owners;
  if (const char* named = ::secure_getenv("WYVERN_CACHE_OWNER"); named != nullptr && *named != 0) {
    owners.trusted = user_of(named);
    if (!owners.trusted) {
      return {.refusal = fmt::format("WYVERN_CACHE_OWNER is {}, which is no user here, so nothing "
                                     "is cached: set it to a user's name or number",
                                     named)};
    }
  }
  const fs::path directory = file.parent_path();
  const Descriptor opened(directory);
  struct stat info{};
  // A file that cannot be opened here cannot be opened later either.
  if (opened.number() < 0 || ::fstat(opened.number(), &info) != 0) return {};
  const bool is_own = info.st_uid == ::geteuid() || info.st_uid == 0;
  if (std::string why = refusal_of(directory.string(), info, S_IFDIR, owners); !why.empty()) {
    return {.refusal = std::move(why)};
  }
  if (const fs::path above = open_to_all(directory); !above.empty()) {
    return {.refusal =
                refusal(fmt::format("the cache's directory {} lies in {}, which anybody may write",
                                    directory.string(), above.string()),
                        fmt::format("chmod +t {}, or {}", above.string(), kOwnDirectory))};
  }
  for (const char* suffix : {"", "-journal", "-wal", "-shm", ".claims", ".repair"}) {
    const std::string name = file.filename().string() + suffix;
    if (::fstatat(opened.number(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    const std::string path = (directory / name).string();
    if (std::string why = refusal_of(path, info, S_IFREG, owners); !why.empty()) {
      return {.refusal = std::move(why)};
    }
  }
  return {.refusal = {}, .read_only = !is_own};
}

}  // namespace wyvern
