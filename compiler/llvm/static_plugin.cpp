// Symbols that LLVM's archives refer to and do not define: extensions that LLVM was built with
// (Polly), which join no pipeline unless an option asks for them.
#include <llvm/Passes/PassPlugin.h>

#define HANDLE_EXTENSION(Extension)                                                    \
  llvm::PassPluginLibraryInfo get##Extension##PluginInfo();                            \
  llvm::PassPluginLibraryInfo get##Extension##PluginInfo() {                           \
    return {LLVM_PLUGIN_API_VERSION, #Extension, "absent", [](llvm::PassBuilder&) {}}; \
  }
#include <llvm/Support/Extension.def>
