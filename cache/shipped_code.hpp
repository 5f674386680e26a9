// Kernels that were compiled in advance and are shipped with the library or beside it.
//
// FOLDER/sm_90a/KEY.kernel is one kernel: a line of JSON, and its code behind it. KEY is the digest
// of the kernel's source, config and target without its compiler (code_key() of the compiler room),
// so that it is found without a compiler. Files are only read, and as trusted as the library
// itself.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/cache.hpp"
#include "runtime/base/own_folder.hpp"

namespace wyvern {

/// Thread-safe; usable in a child of fork(): each find() opens the one file that it reads.
class ShippedCode {
 public:
  /// The paths of $WYVERN_CODE, separated by colons, then the folder installed with this library:
  /// share/wyvern/code beside bin/ or lib/, then those of the Python distributions
  /// wyvern-kernels-sm90 and the like, beside the package whose bin/ or lib/ `own` is.
  static std::vector<std::filesystem::path> default_folders(
      const std::filesystem::path& own = own_folder());
  /// The kernels of default_folders().
  static std::shared_ptr<const ShippedCode> shared();

  /// `report` gets a sentence for each file that is passed over. Default: a line on stderr.
  explicit ShippedCode(std::vector<std::filesystem::path> folders,
                       std::function<void(const std::string&)> report = nullptr);

  [[nodiscard]] bool empty() const noexcept { return folders_.empty(); }
  /// The kernel of this key for a target ("sm_90a"), from the first folder with a complete one; its
  /// row's key is the artifact's, which includes its compiler. Nothing if there is none.
  [[nodiscard]] std::optional<ArtifactRow> find(std::string_view target,
                                                std::string_view code_key) const;

  /// Writes a kernel where find() finds it, whole or not at all. Throws Error(kIo).
  static void write(const std::filesystem::path& folder, std::string_view code_key,
                    const ArtifactRow& row);

 private:
  const std::vector<std::filesystem::path> folders_;
  const std::function<void(const std::string&)> report_;
};

}  // namespace wyvern
