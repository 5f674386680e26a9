// Relocatable object -> shared object that dlopen loads with no LLVM in the process.
#pragma once

#include <cstdint>
#include <string>

#include "compiler/llvm/clang.hpp"

namespace wyvern::llvm_plugin {

/// Bytes of machine code in a relocatable object.
std::uint64_t text_size(const std::string& object);

/// Links with LLD. Rejected when the object lacks `entry`, or needs a symbol that a process may not
/// have (memcpy, memmove and memset come from its C library). Thread-safe; links run one at a time,
/// since LLD keeps its state in globals.
Result link_shared(const std::string& object, const std::string& entry);

}  // namespace wyvern::llvm_plugin
