#include "runtime/python/extension/torch_abi.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace wyvern::extension {
namespace {

/// A library that the process has loaded; null where it has not.
void* loaded(const char* name) { return dlopen(name, RTLD_LAZY | RTLD_NOLOAD); }

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

Torch load() {
  void* const library = loaded("libtorch_cpu.so");
  if (library == nullptr)
    throw std::runtime_error("PyTorch is not loaded; import torch before wyvern's operators");
  Torch all;
#define WYVERN_FIND(result, name, parameters) \
  if (!find(library, #name, all.name))        \
    throw std::runtime_error("this PyTorch lacks " #name "; wyvern needs PyTorch 2.10 or later");
  WYVERN_TORCH_FUNCTIONS(WYVERN_FIND)
#undef WYVERN_FIND
  void* const cuda = loaded("libtorch_cuda.so");
#define WYVERN_FIND(result, name, parameters) \
  if (cuda != nullptr) find(cuda, #name, all.name);
  WYVERN_TORCH_CUDA_FUNCTIONS(WYVERN_FIND)
#undef WYVERN_FIND
  return all;
}

}  // namespace

const Torch& torch() {
  static const Torch all = load();
  return all;
}

}  // namespace wyvern::extension
