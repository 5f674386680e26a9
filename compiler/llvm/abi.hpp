// The C boundary between wyvern_compiler and the plugin that holds Clang, LLVM and LLD. Nothing but
// plain data crosses it: the two sides may use different C++ runtimes.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

enum WyvernLlvmOutput : int {
  kWyvernLlvmSharedObject = 0,
  kWyvernLlvmIr = 1,
  kWyvernLlvmAssembly = 2,
  kWyvernLlvmObject = 3,
};

enum WyvernLlvmStatus : int {
  kWyvernLlvmOk = 0,
  kWyvernLlvmRejected = 1,  ///< the source has errors; the bytes are the diagnostics
  kWyvernLlvmFailed = 2,    ///< the machine failed (descriptors, a pipe); the bytes say how
  kWyvernLlvmNoMemory = 3,  ///< there are no bytes
};

struct WyvernLlvmInput {
  const char* source;  ///< C++ text, `source_size` bytes; a zero byte follows it
  std::size_t source_size;
  const char* file_name;       ///< the source's name in diagnostics
  const char* entry;           ///< the function that must be defined, with C linkage
  const char* const* options;  ///< arguments of `clang -cc1`, less target, CPU, input and output
  std::size_t option_count;
  WyvernLlvmOutput output;
};

/// Takes the result, in one call: the output, or the error text. Throws nothing.
using WyvernLlvmSink = void (*)(void* context, const char* bytes, std::size_t size);

/// Compiles for the processor this runs on, with every feature it has. `code_bytes` receives the
/// size of the machine code (0 for IR and assembly). Thread-safe. Throws nothing. LLVM cannot
/// continue once it has run out of memory: from then on every call returns kWyvernLlvmNoMemory.
using WyvernLlvmCompile = WyvernLlvmStatus(const WyvernLlvmInput* input, WyvernLlvmSink sink,
                                           void* context, std::uint64_t* code_bytes);

/// The LLVM version the plugin was built for, "19.1.7"; valid forever.
using WyvernLlvmVersion = const char*();

}  // extern "C"

inline constexpr const char* kWyvernLlvmCompileSymbol = "wyvern_llvm_compile";
inline constexpr const char* kWyvernLlvmVersionSymbol = "wyvern_llvm_version";
