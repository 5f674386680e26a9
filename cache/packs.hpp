// Winners that came with somebody else's tunings: packs (transfer.hpp) in layers behind the user's
// own cache.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/cache.hpp"
#include "runtime/base/mutex.hpp"

namespace wyvern {

/// Packs of one origin: files, and directories whose *.jsonl files count.
struct PackLayer {
  std::string name;  ///< "WYVERN_PACKS", "shipped"
  std::vector<std::filesystem::path> paths;
};

/// A winner of a pack.
struct PackWinner {
  WinnerRow row;
  std::string layer;
  std::filesystem::path file;
  /// Distance between its extents and the requested ones: sum of |log2| distances.
  double distance = 0;
};

/// The packs of a process. A file is opened when a device is asked for the first time, and read
/// where its first line names that device; a row is parsed when its family is asked for. Unreadable
/// files and rows are skipped and reported once. Thread-safe; usable in a child of fork().
class Packs {
 public:
  /// First the paths of $WYVERN_PACKS, separated by colons, then the folder installed with this
  /// library: share/wyvern/packs beside bin/ or lib/.
  static std::vector<PackLayer> default_layers();
  /// The packs of default_layers(), which many runtimes share.
  static std::shared_ptr<Packs> shared();

  /// `report` gets a sentence for each file that is passed over. Default: a line on stderr.
  explicit Packs(std::vector<PackLayer> layers,
                 std::function<void(const std::string&)> report = nullptr);
  Packs(const Packs&) = delete;
  Packs& operator=(const Packs&) = delete;

  /// The winner with exactly these extents: from the first layer that has one; in it the one with
  /// the least ratio of plan to default, then the newest. Ratios and not times, since packs are of
  /// many machines.
  std::optional<PackWinner> find(std::string_view device, std::string_view family,
                                 std::int64_t tokens, std::int64_t sequences)
      WYVERN_EXCLUDES(mutex_);
  /// The winner of the family whose extents are nearest, of the first layer where several are.
  std::optional<PackWinner> nearest(std::string_view device, std::string_view family,
                                    std::int64_t tokens, std::int64_t sequences)
      WYVERN_EXCLUDES(mutex_);

  const std::vector<PackLayer>& layers() const noexcept { return layers_; }

 private:
  struct File {
    std::size_t layer = 0;
    std::filesystem::path path;
    std::string text;
  };
  using Family = std::vector<PackWinner>;  ///< the first of equal extents answers
  struct DevicePacks {
    std::vector<File> files;
    std::map<std::string, Family, std::less<>> families;
  };

  const Family& family_of(std::string_view device, std::string_view family) WYVERN_REQUIRES(mutex_);
  std::vector<File> files_of(std::string_view device);
  Family parse(const std::vector<File>& files, std::string_view device, std::string_view family);

  const std::vector<PackLayer> layers_;
  const std::function<void(const std::string&)> report_;
  Mutex mutex_;
  std::map<std::string, DevicePacks, std::less<>> devices_ WYVERN_GUARDED_BY(mutex_);
};

}  // namespace wyvern
