#include <llvm/Config/llvm-config.h>

#include <utility>

#include "compiler/llvm/abi.hpp"
#include "compiler/llvm/clang.hpp"
#include "compiler/llvm/link.hpp"

extern "C" {

WyvernLlvmVersion wyvern_llvm_version;
WyvernLlvmCompile wyvern_llvm_compile;

__attribute__((visibility("default"))) const char* wyvern_llvm_version() {
  return LLVM_VERSION_STRING;
}

__attribute__((visibility("default"))) WyvernLlvmStatus wyvern_llvm_compile(
    const WyvernLlvmInput* input, WyvernLlvmSink sink, void* context, std::uint64_t* code_bytes) {
  using namespace wyvern::llvm_plugin;
  *code_bytes = 0;
  Result result = run_clang(*input);
  const bool machine_code =
      input->output == kWyvernLlvmObject || input->output == kWyvernLlvmSharedObject;
  if (result.status == kWyvernLlvmOk && machine_code) {
    *code_bytes = text_size(result.bytes);
    if (input->output == kWyvernLlvmSharedObject) result = link_shared(result.bytes, input->entry);
  }
  sink(context, result.bytes.data(), result.bytes.size());
  return result.status;
}

}  // extern "C"
