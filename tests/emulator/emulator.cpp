#include "tests/emulator/emulator.hpp"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <wyvern/error.hpp>
#include <wyvern/sha256.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "compiler/backend.hpp"
#include "templates/source.hpp"
#include "tests/emulator/block.hpp"
#include "tests/emulator/tensor.hpp"

namespace wyvern::emulator {
namespace {

namespace fs = std::filesystem;

using Entry = void (*)(void* const* arguments, const Extents& e);

struct Kernel {
  Machine** machine = nullptr;
  Entry entry = nullptr;
};

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

constexpr const char* kTestKernel = "kernel.cu";

Template test_kernel() {
  Template t;
  t.name = "test";
  t.variant = "kernel";
  t.source = kTestKernel;
  return t;
}

/// The kernel as host C++: the template with this folder's ptx.cuh, and a way in. `text` is that of
/// a test's kernel.
std::string host_source(const Template& t, const Constants& constants, const Config& config,
                        std::string_view text) {
  const fs::path folder = WYVERN_EMULATOR_FOLDER;
  const Dialect& dialect = detail::backend(DeviceKind::cuda).dialect();
  const SourceOverrides overrides{
      {kTestKernel, std::string(text)},
      {"device/cuda/ptx.cuh", read_file(folder / "ptx.cuh")},
      {"device/cuda/sm90/ptx.cuh", read_file(folder / "sm90_ptx.cuh")},
      {"emulator/machine.hpp", read_file(folder / "machine.hpp")},
  };
  return specialize(t, constants, config, dialect, overrides) +
         "\nextern \"C\" __attribute__((visibility(\"default\"))) void wyvern_emulated_kernel(\n"
         "    void* const* arguments, const Extents& e) {\n"
         "  call_kernel(wyvern_kernel, arguments, e);\n}\n";
}

/// Compiles into `library`, by way of a name of its own so that concurrent tests never see half a
/// file.
void compile(const std::string& source, const fs::path& library, const std::string& what) {
  const std::string base = fmt::format("{}.{}", library.string(), getpid());
  const std::string source_path = base + ".cpp";
  const std::string log_path = base + ".log";
  std::ofstream(source_path) << source;
  const std::string command = fmt::format(
      "'{}' -std=c++20 -O1 -w -shared -fPIC -fvisibility=hidden -fno-strict-aliasing "
      "-ffp-contract=off -x c++ '{}' -o '{}.so' > '{}' 2>&1",
      WYVERN_EMULATOR_COMPILER, source_path, base, log_path);
  const int status = std::system(command.c_str());
  if (status != 0)
    throw Error(ErrorKind::kCompile,
                fmt::format("emulated {} does not compile:\n{}", what, read_file(log_path)));
  fs::rename(base + ".so", library);
  fs::remove(source_path);
  fs::remove(log_path);
}

const Kernel& load(const std::string& source, const std::string& what) {
  static std::mutex mutex;
  static std::map<std::string, Kernel> loaded;
  const std::string key = sha256_hex(source);
  const std::lock_guard lock(mutex);
  Kernel& kernel = loaded[key];
  if (kernel.entry != nullptr) return kernel;
  const fs::path folder = fs::temp_directory_path() / fmt::format("wyvern-emulator-{}", getuid());
  fs::create_directories(folder);
  const fs::path library = folder / (key + ".so");
  if (!fs::exists(library)) compile(source, library, what);
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw Error(ErrorKind::kCompile, dlerror());
  kernel.machine = static_cast<Machine**>(dlsym(handle, "wyvern_machine"));
  kernel.entry = reinterpret_cast<Entry>(dlsym(handle, "wyvern_emulated_kernel"));
  return kernel;
}

void launch(const Kernel& kernel, const Geometry& geometry, const Extents& e,
            std::span<void* const> arguments, Schedule schedule) {
  static std::mutex one_launch;  // a loaded kernel has one machine
  const std::lock_guard lock(one_launch);
  Block block(static_cast<int>(geometry.threads), geometry.shared_bytes, schedule);
  *kernel.machine = &block.machine();
  const std::int64_t blocks = geometry.grid[0] * geometry.grid[1] * geometry.grid[2];
  block.machine().blocks = geometry.grid[0];
  for (std::int64_t i = 0; i < blocks; ++i)
    block.run(i, [&] { kernel.entry(arguments.data(), e); });
}

}  // namespace

void emulate(const Template& t, const Constants& constants, const Config& config, const Extents& e,
             std::span<void* const> arguments, Schedule schedule) {
  const Spec spec(constants, config);
  std::vector<std::int64_t> strides;
  for (const Parameter& p : t.parameters)
    if (p.strided) strides.push_back(dense_stride(p, spec, e));
  emulate(t, constants, config, t.geometry(spec, e, Limits{}), e, arguments, strides, schedule);
}

void emulate(const Template& t, const Constants& constants, const Config& config,
             const Geometry& geometry, const Extents& e, std::span<void* const> arguments,
             std::span<const std::int64_t> strides, Schedule schedule) {
  const Spec spec(constants, config);
  if (is_empty(geometry)) return;
  const Kernel& kernel = load(host_source(t, constants, config, {}),
                              fmt::format("{} {{{}}}", t.id(), config.to_string()));
  std::vector<void*> all(arguments.begin(), arguments.end());
  std::vector<std::int64_t> own(strides.begin(), strides.end());
  std::map<std::size_t, std::int64_t> stride_of;  // by parameter
  for (std::size_t i = 0; i < t.parameters.size(); ++i)
    if (t.parameters[i].strided) stride_of.emplace(i, own.at(stride_of.size()));
  std::vector<TensorMap> maps(t.tensor_maps.size());
  for (std::size_t i = 0; i < maps.size(); ++i) {
    const TensorMapUse& use = t.tensor_maps[i];
    const std::size_t size = size_of(t.parameters[use.parameter].type.of(constants));
    TiledView view = use.view(spec, e);
    if (const auto stride = stride_of.find(use.parameter); stride != stride_of.end())
      view = with_rows_apart(view, stride->second * static_cast<std::int64_t>(size));
    // As the runtime makes them: nothing is copied of an empty tensor.
    decltype(view.dims) dims;
    for (const std::int64_t extent : view.dims) dims.push_back(std::max<std::int64_t>(extent, 1));
    view.dims = dims;
    maps[i] = encode(view, size, arguments[use.parameter]);
    all.push_back(&maps[i]);
  }
  for (std::int64_t& stride : own) all.push_back(&stride);
  launch(kernel, geometry, e, all, schedule);
}

void emulate(std::string_view source, const Geometry& geometry, const Extents& e,
             std::span<void* const> arguments, Schedule schedule) {
  const Kernel& kernel = load(host_source(test_kernel(), {}, {}, source), "test kernel");
  launch(kernel, geometry, e, arguments, schedule);
}

std::string expand(std::string_view source) {
  return specialize(test_kernel(), {}, {}, detail::backend(DeviceKind::cuda).dialect(),
                    {{kTestKernel, std::string(source)}});
}

}  // namespace wyvern::emulator
