#include "tools/benchmark/hopper/gpu.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <map>

#include "compiler/compiler.hpp"
#include "compiler/cuda/nvrtc.hpp"
#include "runtime/devices/cuda/tensor_map.hpp"
#include "tools/benchmark/hopper/device_code.hpp"

namespace wyvern::hopper {
namespace {

using cuda::check;

const cuda::Driver& driver() {
  std::string problem;
  if (const cuda::Driver* found = cuda::driver(&problem)) return *found;
  throw Error(
      ErrorKind::kUnavailable,
      fmt::format("hopper_bench measures a Hopper GPU (H100, H200), --compile needs none: {}",
                  problem));
}

cuda::StreamHandle stream() {
  static const cuda::StreamHandle made = [] {
    cuda::StreamHandle handle = nullptr;
    constexpr unsigned kOrderedWithCopies = 0;
    check(driver().cuStreamCreate(&handle, kOrderedWithCopies), "cuStreamCreate");
    return handle;
  }();
  return made;
}

cuda::Library load_module(const Program& program) {
  static std::map<std::string, cuda::Library> loaded;
  cuda::Library& library = loaded[program.label];
  if (library == nullptr)
    check(driver().cuLibraryLoadData(&library, compile(program).data(), nullptr, nullptr, 0,
                                     nullptr, nullptr, 0),
          "cuLibraryLoadData");
  return library;
}

}  // namespace

std::string nvrtc_version() { return detail::Nvrtc::instance().version(); }

std::string compile(const Program& program) {
  detail::Code code = detail::Nvrtc::instance().compile(
      source_of(program.source), program.label, cuda_target("sm_90a"), detail::Output::loadable);
  if (code.resources.spill_bytes != 0)
    throw Error(ErrorKind::kCompile, fmt::format("{} spills {} bytes of registers", program.label,
                                                 code.resources.spill_bytes));
  return std::move(code.bytes);
}

Memory::Memory(std::size_t bytes) : bytes_(bytes) {
  check(driver().cuMemAlloc(&address_, bytes), "cuMemAlloc");
}
Memory::~Memory() { driver().cuMemFree(address_); }
void Memory::write(const void* from, std::size_t bytes) const {
  check(driver().cuMemcpyHtoD(address_, from, bytes), "cuMemcpyHtoD");
}
void Memory::read(void* to, std::size_t bytes) const {
  synchronize();
  check(driver().cuMemcpyDtoH(to, address_, bytes), "cuMemcpyDtoH");
}

Kernel kernel(const Program& program, const std::string& name, unsigned shared_bytes) {
  cuda::KernelHandle handle = nullptr;
  Kernel found;
  check(driver().cuLibraryGetKernel(&handle, load_module(program), name.c_str()), name.c_str());
  check(driver().cuKernelGetFunction(&found.function, handle), "cuKernelGetFunction");
  check(driver().cuFuncSetAttribute(found.function, cuda::kMaxDynamicSharedBytes,
                                    static_cast<int>(shared_bytes)),
        "cuFuncSetAttribute");
  return found;
}

void launch_raw(Kernel kernel, const Shape& shape, void** arguments) {
  cuda::LaunchAttribute programmatic{cuda::kProgrammaticStreamSerialization, 0, {.allowed = 1}};
  const cuda::LaunchConfig config{{shape.grid, 1, 1}, {shape.threads, 1, 1},
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
  driver().cuEventDestroy(start_);
  driver().cuEventDestroy(stop_);
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
  check(driver().cuStreamBeginCapture(stream(), cuda::kCaptureModeThreadLocal),
        "cuStreamBeginCapture");
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
  const auto tokens = static_cast<std::int64_t>(view.tokens);
  const auto heads = static_cast<std::int64_t>(view.heads);
  TensorMap map = cuda::encode_tiled(driver(),
                                     {.dims = {64, tokens, 2, heads},
                                      .strides = {heads * 256, 128, 256},
                                      .box = {64, view.rows, view.halves, 1},
                                      .swizzle = Swizzle::bytes128},
                                     DType::bf16);
  // An address of the device is an integer to the driver's other calls and a pointer to this one.
  cuda::place(driver(), map, reinterpret_cast<void*>(view.address));
  return map;
}

const GpuFacts& open_gpu() {
  static const GpuFacts facts = [] {
    const cuda::Driver& d = driver();
    int count = 0;
    check(d.cuDeviceGetCount(&count), "cuDeviceGetCount");
    if (count == 0) throw Error(ErrorKind::kUnavailable, "the NVIDIA driver lists no GPU");
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
    const int major = attribute(cuda::kComputeCapabilityMajor);
    const int minor = attribute(cuda::kComputeCapabilityMinor);
    if (major != 9 || minor != 0)
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("the first GPU, {}, has compute capability {}.{}; hopper_bench "
                              "measures 9.0 (H100, H200)",
                              found.name, major, minor));
    found.multiprocessors = static_cast<unsigned>(attribute(cuda::kMultiprocessorCount));
    found.l2_bytes = static_cast<std::size_t>(attribute(cuda::kL2CacheBytes));
    int version = 0;
    check(d.cuDriverGetVersion(&version), "cuDriverGetVersion");
    found.driver = fmt::format("{}.{}", version / 1000, version % 1000 / 10);
    cuda::Context context = nullptr;
    check(d.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(d.cuCtxSetCurrent(context), "cuCtxSetCurrent");
    return found;
  }();
  return facts;
}

}  // namespace wyvern::hopper
