// The plugin with Clang and LLVM, opened at run time.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "compiler/backend.hpp"
#include "compiler/llvm/abi.hpp"

namespace wyvern::detail {

/// One opened plugin. Immutable after construction; every member is thread-safe. The library stays
/// loaded for the life of the process: LLVM does not survive dlclose.
class ClangPlugin {
 public:
  /// Opens the first of `paths` that exists; throws Error(kUnavailable) when none does or when it
  /// does not load.
  explicit ClangPlugin(std::span<const std::filesystem::path> paths);

  /// The process's plugin, opened on first use. After a failure each call throws the Error again.
  static const ClangPlugin& instance();

  /// Throws like compile_source; Output::loadable gives a shared object.
  Code compile(const std::string& source, const std::string& label, const Target& target,
               Output output) const;

 private:
  WyvernLlvmCompile* compile_ = nullptr;
};

/// "LLVM 19.1.7" without opening the plugin: the version it was built with. Throws
/// Error(kUnavailable) in a build without it.
std::string llvm_version();

/// The options that Clang is given for a target.
std::vector<std::string> cpu_options(const Target& target);

/// Where the plugin may be, relative to the executable or library with this code.
std::vector<std::filesystem::path> plugin_paths();

}  // namespace wyvern::detail
