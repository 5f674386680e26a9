// Winners that came with somebody else's tunings: packs (transfer.hpp) in layers behind the user's
// own cache.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
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
  WinnerRow row;          ///< without `problem`, samples and clocks
  bool stand_in = false;  ///< of another GPU than the one asked for, which no pack names
  std::size_t layer = 0;  ///< an index of Packs::layers()
  std::filesystem::path file;
};

/// The packs of a process. A file is opened when a device is asked for the first time, and read
/// where its first line names that device or one that differs in threads alone; a row is parsed
/// when families that begin like its own are asked for. Unreadable files and rows are skipped and
/// reported once. Thread-safe; usable in a child of fork().
class Packs {
 public:
  using Winners = std::shared_ptr<const std::vector<PackWinner>>;

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

  /// The winners of the device, and of those that differ from it in threads alone, whose family
  /// begins so; for a GPU that no pack names those of the nearest one of its architecture. By
  /// layer, device, family, tokens and sequences, and where these are equal by the least ratio of
  /// plan to default, then the newest. Ratios and not times, since packs are of many machines.
  /// Never null; later calls return the same object.
  Winners winners_of(std::string_view device, std::string_view family_prefix)
      WYVERN_EXCLUDES(mutex_);

  const std::vector<PackLayer>& layers() const noexcept { return layers_; }

 private:
  struct File {
    std::size_t layer = 0;
    std::filesystem::path path;
    std::string text;
  };
  struct DevicePacks {
    std::string model;  ///< whose winners count: the device's own, or a stand-in's
    std::vector<File> files;
    std::map<std::string, Winners, std::less<>> families;  ///< by how they begin
  };

  DevicePacks packs_of(std::string_view model);
  std::vector<PackWinner> parse(const DevicePacks& packs, bool stand_in,
                                std::string_view family_prefix);

  const std::vector<PackLayer> layers_;
  const std::function<void(const std::string&)> report_;
  Mutex mutex_;
  /// By DeviceParts::model.
  std::map<std::string, DevicePacks, std::less<>> devices_ WYVERN_GUARDED_BY(mutex_);
};

}  // namespace wyvern
