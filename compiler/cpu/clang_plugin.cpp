#include "compiler/cpu/clang_plugin.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "compiler/sanitized.hpp"
#include "runtime/base/own_folder.hpp"
#include "templates/source.hpp"

namespace wyvern::detail {
namespace {

namespace fs = std::filesystem;

// Sanitizers forbid RTLD_DEEPBIND; without it a second Clang in the process would use this one's
// symbols.
constexpr int kOpenFlags = RTLD_NOW | RTLD_LOCAL | (kSanitized ? 0 : RTLD_DEEPBIND);

WyvernLlvmOutput to_abi(Output output) {
  switch (output) {
    case Output::llvm_ir: return kWyvernLlvmIr;
    case Output::assembly: return kWyvernLlvmAssembly;
    case Output::object: return kWyvernLlvmObject;
    case Output::loadable:
    case Output::ptx: break;
  }
  return kWyvernLlvmSharedObject;
}

/// The plugin's answer, or that there was no memory for it.
struct Taken {
  std::string bytes;
  bool is_whole = true;
};

void take(void* taken, const char* bytes, std::size_t size) {
  auto& to = *static_cast<Taken*>(taken);
  try {
    to.bytes.assign(bytes, size);
  } catch (const std::bad_alloc&) {  // it must not pass through the plugin
    to.is_whole = false;
  }
}

[[noreturn]] void unavailable(const std::string& what) {
  throw Error(ErrorKind::kUnavailable, what);
}

/// Checked first, since without /proc the plugin is not found, and the message would name that
/// instead.
void require_proc() {
  if (access("/proc/self/fd", F_OK) != 0)
    unavailable(
        "/proc is not mounted; compiling CPU kernels finds its parts by it, so mount it "
        "(`mount -t proc proc /proc`)");
}

/// LLVM's libraries allocate objects while they are loaded, and end the process without memory for
/// one; so the memory of both the libraries and a compile is checked before.
void require_memory() {
  constexpr std::size_t kTaken = std::size_t{272} << 20;
  void* const memory =
      mmap(nullptr, kTaken, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    unavailable(
        fmt::format("there are no {} MiB of address space for the compiler of CPU kernels; raise "
                    "the limit (ulimit -v)",
                    kTaken >> 20));
  munmap(memory, kTaken);
}

}  // namespace

std::vector<fs::path> plugin_paths() {
  const fs::path folder = own_folder();
  std::vector<fs::path> paths;
  // The last one: the Python distribution wyvern-kernels-cpu beside the package wyvern, seen from
  // its lib or bin.
  for (const char* place : {"wyvern", WYVERN_PLUGIN_FROM_BIN, "../lib/wyvern", ".", "../lib",
                            "../../wyvern_kernels_cpu"})
    paths.push_back((folder / place / "libwyvern_llvm.so").lexically_normal());
  return paths;
}

ClangPlugin::ClangPlugin(std::span<const fs::path> paths) {
  require_proc();
  const auto exists = [](const fs::path& path) {
    std::error_code error;
    return fs::exists(path, error);
  };
  const auto path = std::find_if(paths.begin(), paths.end(), exists);
  if (path == paths.end())
    unavailable(
        fmt::format("the plugin libwyvern_llvm.so, which compiles CPU kernels, is not at "
                    "{}; run `pip install wyvern-kernels-cpu`, or build Wyvern with "
                    "WYVERN_CPU=ON",
                    paths.empty() ? "any place" : paths.front().string()));
  require_memory();
  void* library = dlopen(path->c_str(), kOpenFlags);
  if (library == nullptr)
    unavailable(
        fmt::format("the plugin that compiles CPU kernels does not load ({}); install "
                    "Debian's packages libllvm19 and libclang-cpp19",
                    dlerror()));
  compile_ = reinterpret_cast<WyvernLlvmCompile*>(dlsym(library, kWyvernLlvmCompileSymbol));
  const auto version =
      reinterpret_cast<WyvernLlvmVersion*>(dlsym(library, kWyvernLlvmVersionSymbol));
  if (compile_ == nullptr || version == nullptr ||
      fmt::format("LLVM {}", version()) != llvm_version())
    unavailable(
        fmt::format("{} belongs to another build of Wyvern than this program ({}); install "
                    "both from the same build",
                    path->string(), llvm_version()));
}

const ClangPlugin& ClangPlugin::instance() {
  static const ClangPlugin plugin(plugin_paths());
  return plugin;
}

Code ClangPlugin::compile(const std::string& source, const std::string& label, const Target& target,
                          Output output) const {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<std::string> options = cpu_options(target);
  std::vector<const char*> arguments;
  for (const std::string& option : options) arguments.push_back(option.c_str());
  const std::string entry(kEntryPoint);
  const WyvernLlvmInput input{source.c_str(),   source.size(),    "kernel.cpp",  entry.c_str(),
                              arguments.data(), arguments.size(), to_abi(output)};
  Taken taken;
  std::uint64_t code_bytes = 0;
  const WyvernLlvmStatus status = compile_(&input, &take, &taken, &code_bytes);
  if (status == kWyvernLlvmNoMemory || !taken.is_whole) throw std::bad_alloc();
  Code code;
  code.bytes = std::move(taken.bytes);
  if (status == kWyvernLlvmFailed)
    unavailable(fmt::format("{} cannot be linked: {}", label, code.bytes));
  if (status != kWyvernLlvmOk)
    throw Error(ErrorKind::kCompile,
                fmt::format("{} does not compile ({}):\n{}", label, llvm_version(), code.bytes));
  code.resources.code_bytes = static_cast<std::int64_t>(code_bytes);
  code.compile_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return code;
}

std::string llvm_version() {
#ifdef WYVERN_LLVM_VERSION
  return "LLVM " WYVERN_LLVM_VERSION;
#else
  unavailable("this build of Wyvern cannot compile CPU kernels; build it with WYVERN_CPU=ON");
#endif
}

std::vector<std::string> cpu_options(const Target& target) {
  return {
      "-x",
      "c++",
      "-std=c++20",
      "-O3",
      "-vectorize-loops",
      "-vectorize-slp",
      // Templates say which loops to unroll; unrolling the others makes compilation a third longer.
      "-fno-unroll-loops",
      // Clang prefers 256-bit vectors on AVX-512 machines, which halves a tile product.
      fmt::format("-mprefer-vector-width={}", target.limits.vector_bits),
      "-mrelocation-model",
      "pic",
      "-pic-level",
      "2",
      "-mcmodel=small",
      "-mframe-pointer=none",
      // Fast arithmetic that keeps infinities, NaNs and the written order of sums.
      "-ffp-contract=fast",
      "-fno-signed-zeros",
      "-nostdsysteminc",
      "-nobuiltininc",
      "-Wno-psabi",
  };
}

}  // namespace wyvern::detail
