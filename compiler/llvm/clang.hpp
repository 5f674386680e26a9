// Source text -> LLVM IR, assembly or a relocatable object, with Clang as a library.
#pragma once

#include <string>

#include "compiler/llvm/abi.hpp"

namespace wyvern::llvm_plugin {

struct Result {
  WyvernLlvmStatus status = kWyvernLlvmOk;
  std::string bytes;  ///< the output, or the error text
};

/// Runs `clang -cc1` in this thread on text in memory; reads no file. A request for a shared object
/// gives the relocatable object to link. Thread-safe.
Result run_clang(const WyvernLlvmInput& input);

}  // namespace wyvern::llvm_plugin
