#include <llvm/Config/llvm-config.h>
#include <llvm/Support/ErrorHandling.h>

#include <atomic>
#include <new>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "compiler/llvm/abi.hpp"
#include "compiler/llvm/clang.hpp"
#include "compiler/llvm/link.hpp"

namespace {

using namespace wyvern::llvm_plugin;

WyvernLlvmStatus compile(const WyvernLlvmInput& input, WyvernLlvmSink sink, void* context,
                         std::uint64_t* code_bytes) {
  Result result = run_clang(input);
  const bool machine_code =
      input.output == kWyvernLlvmObject || input.output == kWyvernLlvmSharedObject;
  if (result.status == kWyvernLlvmOk && machine_code) {
    *code_bytes = text_size(result.bytes);
    if (input.output == kWyvernLlvmSharedObject) result = link_shared(result.bytes, input.entry);
  }
  sink(context, result.bytes.data(), result.bytes.size());
  return result.status;
}

}  // namespace

extern "C" {

// LLVM's and Clang's static objects are never destroyed, so that a process may end while its
// threads compile: this replaces the C library's function by which the plugin and its libraries
// would register their destructors. The plugin stays loaded, so destructors are never needed.
int destroy_never(void (*destroy)(void*), void* object, void* library) __asm__("__cxa_atexit");
__attribute__((visibility("default"))) int destroy_never(void (* /*destroy*/)(void*),
                                                         void* /*object*/, void* /*library*/) {
  return 0;
}

WyvernLlvmVersion wyvern_llvm_version;
WyvernLlvmCompile wyvern_llvm_compile;

__attribute__((visibility("default"))) const char* wyvern_llvm_version() {
  return LLVM_VERSION_STRING;
}

__attribute__((visibility("default"))) WyvernLlvmStatus wyvern_llvm_compile(
    const WyvernLlvmInput* input, WyvernLlvmSink sink, void* context, std::uint64_t* code_bytes) {
  *code_bytes = 0;
  static const bool throws_instead = [] {
    // LLVM's own way is to end the process.
    llvm::install_bad_alloc_error_handler([](void*, const char*, bool) { throw std::bad_alloc(); });
    llvm::install_fatal_error_handler([](void*, const char*, bool) { throw std::bad_alloc(); });
    return true;
  }();
  static_cast<void>(throws_instead);
  // LLVM is never called again after an exception passed through it: its code is not
  // exception-safe.
  static std::atomic<bool> broken = false;
  if (!broken) try {
      return compile(*input, sink, context, code_bytes);
    } catch (const std::runtime_error& error) {  // of the linker
      broken = true;
      const std::string_view text = error.what();
      sink(context, text.data(), text.size());
      return kWyvernLlvmFailed;
    } catch (...) {
      broken = true;
    }
  return kWyvernLlvmNoMemory;
}

}  // extern "C"
