// NVRTC, opened at run time. No header of CUDA's is needed to build this.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "compiler/backend.hpp"

namespace wyvern::detail {

/// The identity of an NVRTC in keys.
struct NvrtcIdentity {
  int major = 0;
  std::string build;  ///< tells two builds apart
};

/// The functions of one libnvrtc. Immutable after construction; every member is thread-safe. The
/// library stays loaded for the life of the process.
class Nvrtc {
 public:
  /// Opens the first of `names` that loads; throws Error(kUnavailable) when none does.
  explicit Nvrtc(std::span<const char* const> names);

  /// The process's NVRTC, opened on first use: nvrtc_file(), else the one that the loader finds.
  /// After a failure each call throws the Error again.
  static const Nvrtc& instance();
  /// Of instance(), which is opened only if its file does not have it. If the file is replaced
  /// before it is opened, the identity changes then.
  static NvrtcIdentity identity();

  /// "NVRTC 13.0"
  std::string version() const;

  /// Throws like compile_source; Output::loadable gives a cubin, Output::ptx its PTX.
  Code compile(const std::string& source, const std::string& label, const Target& target,
               Output output) const;

 private:
  struct Functions;
  void require_arch(const Target& target) const;

  const Functions* functions_;  ///< lives as long as the process, like the library
  std::vector<int> archs_;
  int major_ = 0;
  int minor_ = 0;
  std::string build_;  ///< NvrtcIdentity::build
};

/// The options for a target of an NVRTC of this major version.
std::vector<std::string> nvrtc_options(const Target& target, int major);

/// Registers, memory and spills from ptxas's verbose output, summed over the functions that it did
/// not inline.
Resources parse_ptxas(const std::string& log);

/// The line in which ptxas says that it serializes wgmma or drops setmaxnreg (remarks C7507 to
/// C7519), or nothing. compile() makes it an error: such a kernel is correct but slow, and no test
/// would notice.
std::string find_serialization(const std::string& log);

}  // namespace wyvern::detail
