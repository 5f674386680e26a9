// From a template to the source that is compiled.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "templates/template.hpp"

namespace wyvern {

/// The embedded text of a file under templates/; throws Error(kBadInput) for an unknown name.
std::string_view source_text(std::string_view path);

/// A file named here has the text given instead of its own: this is how the emulator of
/// tests/emulator puts itself in the place of the hardware.
using SourceOverrides = std::map<std::string, std::string, std::less<>>;

/// The source to compile. After the prelude of the kind of device come, as constexpr values and
/// type aliases, the constants and tunables (and `Spec`, a type that has them as members), then
/// WYVERN_PARAMETERS, the kernel's parameters by name (tensors, tensor maps, sizes), then the
/// template's file with its includes expanded once each (with #line, so that errors name the file).
std::string specialize(const Template& t, const Constants& constants, const Config& config,
                       const SourceOverrides& overrides = {});

/// What specialize() depends on, in a few kilobytes: the name and SHA-256 of every file that it
/// expands, in order, and all that it adds to them. Equal for equal sources. Thread-safe.
std::string source_identity(const Template& t, const Constants& constants, const Config& config);

/// Every kernel's entry point.
inline constexpr std::string_view kEntryPoint = "wyvern_kernel";

}  // namespace wyvern
