#include "tools/benchmark/hopper/gpu.hpp"

#include <fmt/format.h>

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>

#include "tools/benchmark/hopper/device_code.hpp"

namespace wyvern::hopper {
namespace {

using Result = int;

template <class F>
void bind(void* library, const char* symbol, F& function, const char* what) {
  function = reinterpret_cast<F>(dlsym(library, symbol));
  if (function == nullptr)
    throw std::runtime_error(fmt::format("{} has no {}; install a newer one", what, symbol));
}

/// CUlaunchAttribute: a number that names it, then a union of 64 bytes.
struct LaunchAttribute {
  std::uint32_t id;
  std::uint32_t padding;
  std::array<std::int32_t, 16> value;
};
constexpr std::uint32_t kProgrammaticStreamSerialization = 6;

/// CUlaunchConfig.
struct LaunchConfig {
  std::array<unsigned, 3> grid;
  std::array<unsigned, 3> block;
  unsigned shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

/// Under the names that the library exports: a suffix names the variant of CUDA 12.
struct Driver {
  Result (*cuInit)(unsigned);
  Result (*cuDriverGetVersion)(int*);
  Result (*cuDeviceGetCount)(int*);
  Result (*cuDeviceGet)(int*, int);
  Result (*cuDeviceGetName)(char*, int, int);
  Result (*cuDeviceGetAttribute)(int*, int, int);
  Result (*cuDevicePrimaryCtxRetain)(void**, int);
  Result (*cuCtxSetCurrent)(void*);
  Result (*cuMemAlloc_v2)(DevicePointer*, std::size_t);
  Result (*cuMemFree_v2)(DevicePointer);
  Result (*cuMemcpyHtoD_v2)(DevicePointer, const void*, std::size_t);
  Result (*cuMemcpyDtoH_v2)(void*, DevicePointer, std::size_t);
  Result (*cuStreamCreate)(void**, unsigned);
  Result (*cuStreamSynchronize)(void*);
  Result (*cuStreamBeginCapture_v2)(void*, int);
  Result (*cuStreamEndCapture)(void*, void**);
  Result (*cuGraphInstantiateWithFlags)(void**, void*, unsigned long long);
  Result (*cuGraphLaunch)(void*, void*);
  Result (*cuGraphExecDestroy)(void*);
  Result (*cuGraphDestroy)(void*);
  Result (*cuEventCreate)(void**, unsigned);
  Result (*cuEventDestroy_v2)(void*);
  Result (*cuEventRecord)(void*, void*);
  Result (*cuEventSynchronize)(void*);
  Result (*cuEventElapsedTime)(float*, void*, void*);
  Result (*cuModuleLoadData)(void**, const void*);
  Result (*cuModuleGetFunction)(void**, void*, const char*);
  Result (*cuFuncSetAttribute)(void*, int, int);
  Result (*cuLaunchKernelEx)(const LaunchConfig*, void*, void**, void**);
  Result (*cuTensorMapEncodeTiled)(TensorMap*, int, std::uint32_t, void*, const std::uint64_t*,
                                   const std::uint64_t*, const std::uint32_t*, const std::uint32_t*,
                                   int, int, int, int);
  Result (*cuGetErrorName)(Result, const char**);
};

Driver load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw std::runtime_error(
        "libcuda.so.1, the NVIDIA driver, is not on this machine: hopper_bench measures a Hopper "
        "GPU (H100, H200); --compile needs none");
  Driver d{};
  const char* what = "the NVIDIA driver";
#define WYVERN_BIND(name) bind(library, #name, d.name, what)
  WYVERN_BIND(cuInit);
  WYVERN_BIND(cuDriverGetVersion);
  WYVERN_BIND(cuDeviceGetCount);
  WYVERN_BIND(cuDeviceGet);
  WYVERN_BIND(cuDeviceGetName);
  WYVERN_BIND(cuDeviceGetAttribute);
  WYVERN_BIND(cuDevicePrimaryCtxRetain);
  WYVERN_BIND(cuCtxSetCurrent);
  WYVERN_BIND(cuMemAlloc_v2);
  WYVERN_BIND(cuMemFree_v2);
  WYVERN_BIND(cuMemcpyHtoD_v2);
  WYVERN_BIND(cuMemcpyDtoH_v2);
  WYVERN_BIND(cuStreamCreate);
  WYVERN_BIND(cuStreamSynchronize);
  WYVERN_BIND(cuStreamBeginCapture_v2);
  WYVERN_BIND(cuStreamEndCapture);
  WYVERN_BIND(cuGraphInstantiateWithFlags);
  WYVERN_BIND(cuGraphLaunch);
  WYVERN_BIND(cuGraphExecDestroy);
  WYVERN_BIND(cuGraphDestroy);
  WYVERN_BIND(cuEventCreate);
  WYVERN_BIND(cuEventDestroy_v2);
  WYVERN_BIND(cuEventRecord);
  WYVERN_BIND(cuEventSynchronize);
  WYVERN_BIND(cuEventElapsedTime);
  WYVERN_BIND(cuModuleLoadData);
  WYVERN_BIND(cuModuleGetFunction);
  WYVERN_BIND(cuFuncSetAttribute);
  WYVERN_BIND(cuLaunchKernelEx);
  WYVERN_BIND(cuTensorMapEncodeTiled);
  WYVERN_BIND(cuGetErrorName);
#undef WYVERN_BIND
  return d;
}

const Driver& driver() {
  static const Driver loaded = load_driver();
  return loaded;
}

void check(Result result, const char* what) {
  if (result == 0) return;
  const char* name = nullptr;
  driver().cuGetErrorName(result, &name);
  throw std::runtime_error(
      fmt::format("{} failed: {}", what, name != nullptr ? name : std::to_string(result)));
}

void* stream() {
  static void* const made = [] {
    void* handle = nullptr;
    constexpr unsigned kOrderedWithCopies = 0;
    check(driver().cuStreamCreate(&handle, kOrderedWithCopies), "cuStreamCreate");
    return handle;
  }();
  return made;
}

using NvrtcProgram = struct OpaqueProgram*;

struct Nvrtc {
  Result (*nvrtcVersion)(int*, int*);
  Result (*nvrtcCreateProgram)(NvrtcProgram*, const char*, const char*, int, const char* const*,
                               const char* const*);
  Result (*nvrtcDestroyProgram)(NvrtcProgram*);
  Result (*nvrtcCompileProgram)(NvrtcProgram, int, const char* const*);
  Result (*nvrtcGetProgramLogSize)(NvrtcProgram, std::size_t*);
  Result (*nvrtcGetProgramLog)(NvrtcProgram, char*);
  Result (*nvrtcGetCUBINSize)(NvrtcProgram, std::size_t*);
  Result (*nvrtcGetCUBIN)(NvrtcProgram, char*);
};

Nvrtc load_nvrtc() {
  void* library = nullptr;
  for (const char* name : {"libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so.13",
                           "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so.12"}) {
    library = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    if (library != nullptr) break;
  }
  if (library == nullptr)
    throw std::runtime_error(
        "NVRTC, which compiles the kernels, was not found as libnvrtc.so.13 or .12; install it "
        "with `pip install nvidia-cuda-nvrtc` or from the CUDA toolkit");
  Nvrtc n{};
  const char* what = "libnvrtc";
#define WYVERN_BIND(name) bind(library, #name, n.name, what)
  WYVERN_BIND(nvrtcVersion);
  WYVERN_BIND(nvrtcCreateProgram);
  WYVERN_BIND(nvrtcDestroyProgram);
  WYVERN_BIND(nvrtcCompileProgram);
  WYVERN_BIND(nvrtcGetProgramLogSize);
  WYVERN_BIND(nvrtcGetProgramLog);
  WYVERN_BIND(nvrtcGetCUBINSize);
  WYVERN_BIND(nvrtcGetCUBIN);
#undef WYVERN_BIND
  return n;
}

const Nvrtc& nvrtc() {
  static const Nvrtc loaded = load_nvrtc();
  return loaded;
}

/// Spills, and the remarks C7507 to C7519 by which ptxas says that it serialized wgmma or dropped a
/// register count: code that would be measured as something else.
std::vector<std::string> problems_in(const std::string& log) {
  std::vector<std::string> found;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    bool bad = line.find("warning") != std::string::npos;
    for (int code = 7507; code <= 7519; ++code)
      bad = bad || line.find(fmt::format("C{}", code)) != std::string::npos;
    bad = bad || (line.find(" bytes spill stores") != std::string::npos &&
                  line.find(" 0 bytes spill stores") == std::string::npos);
    if (bad) found.push_back(line);
  }
  return found;
}

void* load_module(const Program& program) {
  static std::map<std::string, void*> loaded;
  void*& handle = loaded[program.label];
  if (handle != nullptr) return handle;
  const Compiled code = compile(program);
  if (!code.problems.empty())
    throw std::runtime_error(fmt::format("{}: {}", program.label, code.problems.front()));
  check(driver().cuModuleLoadData(&handle, code.cubin.data()), "cuModuleLoadData");
  return handle;
}

}  // namespace

std::string nvrtc_version() {
  int major = 0;
  int minor = 0;
  nvrtc().nvrtcVersion(&major, &minor);
  return fmt::format("{}.{}", major, minor);
}

Compiled compile(const Program& program) {
  const std::string source = device_code() + program.source;
  NvrtcProgram handle = nullptr;
  if (nvrtc().nvrtcCreateProgram(&handle, source.c_str(), "kernel.cu", 0, nullptr, nullptr) != 0)
    throw std::runtime_error("nvrtcCreateProgram failed");
  const std::array options{"-arch=sm_90a",       "-std=c++20",
                           "-default-device",    "--modify-stack-limit=false",
                           "-diag-suppress=177", "--ptxas-options=-v"};
  const Result result =
      nvrtc().nvrtcCompileProgram(handle, static_cast<int>(options.size()), options.data());
  Compiled made;
  std::size_t size = 0;
  nvrtc().nvrtcGetProgramLogSize(handle, &size);
  made.log.resize(size);
  nvrtc().nvrtcGetProgramLog(handle, made.log.data());
  if (result == 0 && nvrtc().nvrtcGetCUBINSize(handle, &size) == 0) {
    made.cubin.resize(size);
    nvrtc().nvrtcGetCUBIN(handle, made.cubin.data());
  }
  nvrtc().nvrtcDestroyProgram(&handle);
  if (result != 0 || made.cubin.empty())
    throw std::runtime_error(fmt::format("{} does not compile:\n{}", program.label, made.log));
  made.problems = problems_in(made.log);
  return made;
}

Memory::Memory(std::size_t bytes) : bytes_(bytes) {
  check(driver().cuMemAlloc_v2(&address_, bytes), "cuMemAlloc");
}
Memory::~Memory() { driver().cuMemFree_v2(address_); }
void Memory::write(const void* from, std::size_t bytes) const {
  check(driver().cuMemcpyHtoD_v2(address_, from, bytes), "cuMemcpyHtoD");
}
void Memory::read(void* to, std::size_t bytes) const {
  synchronize();
  check(driver().cuMemcpyDtoH_v2(to, address_, bytes), "cuMemcpyDtoH");
}

Kernel kernel(const Program& program, const std::string& name, unsigned shared_bytes) {
  Kernel found;
  check(driver().cuModuleGetFunction(&found.function, load_module(program), name.c_str()),
        name.c_str());
  constexpr int kMaxDynamicSharedBytes = 8;
  check(driver().cuFuncSetAttribute(found.function, kMaxDynamicSharedBytes,
                                    static_cast<int>(shared_bytes)),
        "cuFuncSetAttribute");
  return found;
}

void launch_raw(Kernel kernel, const Shape& shape, void** arguments) {
  LaunchAttribute programmatic{kProgrammaticStreamSerialization, 0, {1}};
  const LaunchConfig config{{shape.grid, 1, 1}, {shape.threads, 1, 1},
                            shape.shared_bytes, stream(),
                            &programmatic,      shape.programmatic ? 1U : 0U};
  check(driver().cuLaunchKernelEx(&config, kernel.function, arguments, nullptr),
        "cuLaunchKernelEx");
}

void synchronize() { check(driver().cuStreamSynchronize(stream()), "a kernel"); }

Stopwatch::Stopwatch() {
  check(driver().cuEventCreate(&start_, 0), "cuEventCreate");
  check(driver().cuEventCreate(&stop_, 0), "cuEventCreate");
}
Stopwatch::~Stopwatch() {
  driver().cuEventDestroy_v2(start_);
  driver().cuEventDestroy_v2(stop_);
}
void Stopwatch::start() const { check(driver().cuEventRecord(start_, stream()), "cuEventRecord"); }
double Stopwatch::stop_ms() const {
  check(driver().cuEventRecord(stop_, stream()), "cuEventRecord");
  check(driver().cuEventSynchronize(stop_), "cuEventSynchronize");
  float ms = 0;
  check(driver().cuEventElapsedTime(&ms, start_, stop_), "cuEventElapsedTime");
  return ms;
}

Recording::Recording() {
  constexpr int kThreadLocal = 1;
  check(driver().cuStreamBeginCapture_v2(stream(), kThreadLocal), "cuStreamBeginCapture");
}
Recording::~Recording() {
  if (graph_ == nullptr) driver().cuStreamEndCapture(stream(), &graph_);
  if (executable_ != nullptr) driver().cuGraphExecDestroy(executable_);
  if (graph_ != nullptr) driver().cuGraphDestroy(graph_);
}
void Recording::finish() {
  check(driver().cuStreamEndCapture(stream(), &graph_), "cuStreamEndCapture");
  check(driver().cuGraphInstantiateWithFlags(&executable_, graph_, 0), "cuGraphInstantiate");
}
void Recording::replay() const {
  check(driver().cuGraphLaunch(executable_, stream()), "cuGraphLaunch");
}

TensorMap tensor_map(const TensorView& view) {
  constexpr int kBfloat16 = 9;
  constexpr int kSwizzle128 = 3;
  constexpr int kPromoteTo256Bytes = 3;
  const std::array<std::uint64_t, 4> extents{64, view.tokens, 2, view.heads};
  const std::array<std::uint64_t, 3> strides{view.heads * 256, 128, 256};
  const std::array<std::uint32_t, 4> box{64, view.rows, view.halves, 1};
  const std::array<std::uint32_t, 4> steps{1, 1, 1, 1};
  TensorMap map{};
  void* address = nullptr;
  std::memcpy(static_cast<void*>(&address), &view.address, sizeof address);
  check(driver().cuTensorMapEncodeTiled(&map, kBfloat16, 4, address, extents.data(), strides.data(),
                                        box.data(), steps.data(), 0, kSwizzle128,
                                        kPromoteTo256Bytes, 0),
        "cuTensorMapEncodeTiled");
  return map;
}

const GpuFacts& open_gpu() {
  static const GpuFacts facts = [] {
    const Driver& d = driver();
    check(d.cuInit(0), "cuInit");
    int count = 0;
    check(d.cuDeviceGetCount(&count), "cuDeviceGetCount");
    if (count == 0) throw std::runtime_error("the NVIDIA driver lists no GPU");
    int device = 0;
    check(d.cuDeviceGet(&device, 0), "cuDeviceGet");
    const auto attribute = [&d, device](int which) {
      int value = 0;
      check(d.cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
      return value;
    };
    GpuFacts found;
    std::array<char, 128> name{};
    check(d.cuDeviceGetName(name.data(), static_cast<int>(name.size()), device), "cuDeviceGetName");
    found.name = name.data();
    const int major = attribute(75);
    const int minor = attribute(76);
    if (major != 9 || minor != 0)
      throw std::runtime_error(fmt::format(
          "the first GPU, {}, has compute capability {}.{}; hopper_bench measures 9.0 (H100, H200)",
          found.name, major, minor));
    found.multiprocessors = static_cast<unsigned>(attribute(16));
    found.l2_bytes = static_cast<std::size_t>(attribute(38));
    int version = 0;
    check(d.cuDriverGetVersion(&version), "cuDriverGetVersion");
    found.driver = fmt::format("{}.{}", version / 1000, version % 1000 / 10);
    void* context = nullptr;
    check(d.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(d.cuCtxSetCurrent(context), "cuCtxSetCurrent");
    return found;
  }();
  return facts;
}

}  // namespace wyvern::hopper
