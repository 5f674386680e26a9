// From a template to the source that is compiled.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "templates/template.hpp"

namespace wyvern {

/// The embedded text of a file under templates/; throws Error(kBadInput) for an unknown name.
std::string_view source_text(std::string_view path);

/// Files that are replaced by these texts: so the emulator of tests/emulator replaces instructions
/// of the hardware.
using SourceOverrides = std::map<std::string, std::string, std::less<>>;

/// How sources for one kind of device are assembled. Each back end has one (compiler/).
struct Dialect {
  std::string_view prelude;  ///< the file that comes before everything else
  std::string_view blocks;   ///< the namespace of the device's building blocks: "wyvern::cuda"
  /// Text that defines WYVERN_PARAMETERS, the kernel's parameters by name, and what goes with it.
  std::string (*parameters)(const Template& t);
};

/// "const DTYPE* q": how a kernel declares a tensor. `do` is a word of C++, so it is dO there.
std::string declaration(const Parameter& p);

/// How a kernel declares the stride of a strided tensor: "int64 q_stride".
std::string stride_declaration(const Parameter& p);

/// The source to compile. After the dialect's prelude come, as constexpr values and type aliases,
/// the constants and tunables (and `Spec`, a type that has them as members), then the parameters,
/// then the template's file with its includes expanded once each (with #line, so that errors name
/// the file).
std::string specialize(const Template& t, const Constants& constants, const Config& config,
                       const Dialect& dialect, const SourceOverrides& overrides = {});

/// What specialize() depends on, in a few kilobytes: the name and SHA-256 of every file that it
/// expands, in order, and all that it adds to them. Equal for equal sources. Thread-safe.
std::string source_identity(const Template& t, const Constants& constants, const Config& config,
                            const Dialect& dialect);

/// Every kernel's entry point.
inline constexpr std::string_view kEntryPoint = "wyvern_kernel";

}  // namespace wyvern
