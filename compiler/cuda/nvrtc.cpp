#include "compiler/cuda/nvrtc.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <system_error>

#include "compiler/cuda/nvrtc_file.hpp"

namespace wyvern::detail {
namespace {

constexpr int kSuccess = 0;

using Program = struct OpaqueProgram*;

}  // namespace

/// nvrtc.h's signatures; nvrtcResult is an int.
struct Nvrtc::Functions {
  int (*version)(int* major, int* minor);
  int (*count_archs)(int* count);
  int (*list_archs)(int* archs);
  const char* (*error_string)(int result);
  int (*create)(Program* program, const char* source, const char* name, int header_count,
                const char* const* headers, const char* const* header_names);
  int (*destroy)(Program* program);
  int (*compile)(Program program, int option_count, const char* const* options);
  int (*log_size)(Program program, std::size_t* size);
  int (*log)(Program program, char* log);
  int (*cubin_size)(Program program, std::size_t* size);
  int (*cubin)(Program program, char* cubin);
  int (*ptx_size)(Program program, std::size_t* size);
  int (*ptx)(Program program, char* ptx);
};

namespace {

/// A build's identity from its file alone, so that it is the same before the file is opened.
std::string build_of(const std::string& id) { return fmt::format("NVRTC of build {}", id); }

/// The file a symbol was loaded from.
std::string library_file(const void* symbol) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 ? info.dli_fname : "";
}

void* open_first(std::span<const char* const> names) {
  for (const char* name : names)
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL)) return library;
  throw Error(
      ErrorKind::kUnavailable,
      fmt::format("NVRTC, which compiles CUDA kernels, was not found as {}; install it with "
                  "`pip install nvidia-cuda-nvrtc` or from the CUDA toolkit, and put the "
                  "folder of its libnvrtc.so on the loader's path",
                  fmt::join(names, ", ")));
}

template <class Function>
void resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr)
    throw Error(
        ErrorKind::kUnavailable,
        fmt::format("the libnvrtc on the loader's path lacks {}; install NVRTC 12 or 13", name));
}

/// The number after which `label` stands in `line`, as in "12 bytes spill stores".
std::optional<std::int64_t> number_before(std::string_view line, std::string_view label) {
  const std::size_t end = line.find(label);
  if (end == std::string_view::npos) return {};
  std::size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  std::int64_t number = 0;
  const auto parsed = std::from_chars(line.data() + begin, line.data() + end, number);
  if (parsed.ec != std::errc{}) return {};
  return number;
}

/// Digits of an architecture's name: 90 for "sm_90a".
int arch_number(std::string_view arch) {
  int number = 0;
  const std::size_t start = arch.find('_') + 1;
  std::from_chars(arch.data() + start, arch.data() + arch.size(), number);
  return number;
}

template <class Size, class Read>
std::string read_all(Program program, Size size_of_it, Read read) {
  std::size_t size = 0;
  if (size_of_it(program, &size) != kSuccess || size == 0) return {};
  std::string text(size, '\0');
  if (read(program, text.data()) != kSuccess) return {};
  return text;
}

/// The same, for a text that ends in a zero byte.
template <class Size, class Read>
std::string read_text(Program program, Size size_of_it, Read read) {
  std::string text = read_all(program, size_of_it, read);
  text.resize(std::min(text.find('\0'), text.size()));
  return text;
}

}  // namespace

Resources parse_ptxas(const std::string& log) {
  Resources sum;
  std::int64_t frame = 0;
  std::int64_t cumulative = 0;
  std::string_view rest = log;
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    const auto add = [&line](std::int64_t& total, std::string_view label) {
      if (const auto number = number_before(line, label)) total += *number;
    };
    add(frame, " bytes stack frame");
    add(sum.spill_bytes, " bytes spill stores");
    add(sum.spill_bytes, " bytes spill loads");
    add(cumulative, " bytes cumulative stack size");
    add(sum.shared_bytes, " bytes smem");
    const std::size_t used = line.find("Used ");
    if (used == std::string_view::npos) continue;
    if (const auto number = number_before(line.substr(used), " registers"))
      sum.registers = std::max(sum.registers, static_cast<int>(*number));
  }
  sum.stack_bytes = std::max(frame, cumulative);
  return sum;
}

std::string find_serialization(const std::string& log) {
  for (int code = 7507; code <= 7519; ++code) {
    const std::size_t found = log.find(fmt::format("(C{})", code));
    if (found == std::string::npos) continue;
    const std::size_t begin = log.rfind('\n', found) + 1;
    return log.substr(begin, log.find('\n', found) - begin);
  }
  return {};
}

Nvrtc::Nvrtc(std::span<const char* const> names) {
  void* library = open_first(names);
  auto functions = std::make_unique<Functions>();
  resolve(library, "nvrtcVersion", functions->version);
  resolve(library, "nvrtcGetNumSupportedArchs", functions->count_archs);
  resolve(library, "nvrtcGetSupportedArchs", functions->list_archs);
  resolve(library, "nvrtcGetErrorString", functions->error_string);
  resolve(library, "nvrtcCreateProgram", functions->create);
  resolve(library, "nvrtcDestroyProgram", functions->destroy);
  resolve(library, "nvrtcCompileProgram", functions->compile);
  resolve(library, "nvrtcGetProgramLogSize", functions->log_size);
  resolve(library, "nvrtcGetProgramLog", functions->log);
  resolve(library, "nvrtcGetCUBINSize", functions->cubin_size);
  resolve(library, "nvrtcGetCUBIN", functions->cubin);
  resolve(library, "nvrtcGetPTXSize", functions->ptx_size);
  resolve(library, "nvrtcGetPTX", functions->ptx);
  functions->version(&major_, &minor_);
  int count = 0;
  functions->count_archs(&count);
  archs_.resize(static_cast<std::size_t>(count));
  functions->list_archs(archs_.data());
  const std::string file = library_file(reinterpret_cast<const void*>(functions->version));
  std::error_code error;
  // nvrtcVersion() tells no build number, and two builds of one version make different code; the
  // sizes of their files differ.
  if (const std::string id = build_id(file); !id.empty())
    build_ = build_of(id);
  else
    build_ = fmt::format("{} of {} bytes", version(), std::filesystem::file_size(file, error));
  functions_ = functions.release();
}

/// instance(), once it has been called.
static constinit std::atomic<const Nvrtc*> opened = nullptr;

const Nvrtc& Nvrtc::instance() {
  // Never destroyed: the last threads may compile while the process ends.
  static const Nvrtc& nvrtc = *[] {
    std::vector<const char*> names(std::begin(kNvrtcNames), std::end(kNvrtcNames));
    if (nvrtc_file()) names.insert(names.begin(), nvrtc_file()->path.c_str());
    const auto* const made = new Nvrtc(names);
    opened.store(made, std::memory_order_release);
    return made;
  }();
  return nvrtc;
}

NvrtcIdentity Nvrtc::identity() {
  const Nvrtc* nvrtc = opened.load(std::memory_order_acquire);
  if (nvrtc == nullptr) {
    const std::optional<NvrtcFile>& file = nvrtc_file();
    if (file && !file->build_id.empty()) return {file->major, build_of(file->build_id)};
    nvrtc = &instance();
  }
  return {nvrtc->major_, nvrtc->build_};
}

std::string Nvrtc::version() const { return fmt::format("NVRTC {}.{}", major_, minor_); }

void Nvrtc::require_arch(const Target& target) const {
  if (std::find(archs_.begin(), archs_.end(), arch_number(target.arch)) != archs_.end()) return;
  throw Error(ErrorKind::kUnavailable,
              fmt::format("{} cannot compile for {}, only for sm_{}; install another NVRTC",
                          version(), target.arch, fmt::join(archs_, ", sm_")));
}

std::vector<std::string> nvrtc_options(const Target& target, int major) {
  std::vector<std::string> list{
      "-arch=" + target.arch,
      "-std=c++20",
      "-default-device",
      "--minimal",                   // no texture, surface or device-runtime declarations to parse
      "--modify-stack-limit=false",  // would change the stack limit of the whole process
      "-diag-suppress=177",          // a template need not use every constant it is specialized on
      "--ptxas-options=-v",          // prints the figures that parse_ptxas() reads
  };
  if (major >= 13) {
    list.emplace_back("--frandom-seed=wyvern");  // the same cubin every time
    list.emplace_back("--no-cache");             // Wyvern's own knows more and is checked
  }
  return list;
}

Code Nvrtc::compile(const std::string& source, const std::string& label, const Target& target,
                    Output output) const {
  require_arch(target);
  const auto start = std::chrono::steady_clock::now();
  Program program = nullptr;
  const auto check = [this, &label](int result) {
    if (result != kSuccess)
      throw Error(ErrorKind::kCompile,
                  fmt::format("{}: NVRTC failed: {}", label, functions_->error_string(result)));
  };
  check(functions_->create(&program, source.c_str(), "kernel.cu", 0, nullptr, nullptr));
  const auto destroy = [this](Program made) { functions_->destroy(&made); };
  const std::unique_ptr<OpaqueProgram, decltype(destroy)> owner(program, destroy);

  const std::vector<std::string> texts = nvrtc_options(target, major_);
  std::vector<const char*> arguments;
  for (const std::string& option : texts) arguments.push_back(option.c_str());
  const int result =
      functions_->compile(program, static_cast<int>(arguments.size()), arguments.data());
  const std::string log = read_text(program, functions_->log_size, functions_->log);
  if (result != kSuccess)
    throw Error(ErrorKind::kCompile, fmt::format("{} does not compile ({}): {}\n{}", label,
                                                 version(), functions_->error_string(result), log));
  if (const std::string line = find_serialization(log); !line.empty())
    throw Error(ErrorKind::kCompile,
                fmt::format("{} compiles, but ptxas serializes wgmma or drops setmaxnreg ({}): {}",
                            label, version(), line));
  const std::string cubin = read_all(program, functions_->cubin_size, functions_->cubin);
  Code code;
  code.resources = parse_ptxas(log);
  code.resources.code_bytes = static_cast<std::int64_t>(cubin.size());
  code.bytes =
      output == Output::ptx ? read_text(program, functions_->ptx_size, functions_->ptx) : cubin;
  if (code.bytes.empty())
    throw Error(ErrorKind::kCompile, fmt::format("{}: {} gave no code", label, version()));
  code.compile_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return code;
}

}  // namespace wyvern::detail
