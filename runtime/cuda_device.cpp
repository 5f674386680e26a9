#include "runtime/device_impl.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <array>
#include <mutex>

#include "runtime/cuda_driver.hpp"
#include "runtime/operator_impl.hpp"

namespace wyvern {
namespace {

using cuda::check;

const cuda::Driver& driver_or_throw() {
  std::string problem;
  const cuda::Driver* driver = cuda::driver(&problem);
  if (driver == nullptr) throw Error(ErrorKind::kUnavailable, problem);
  return *driver;
}

int attribute(const cuda::Driver& d, cuda::DeviceHandle device, cuda::DeviceAttribute which) {
  int value = 0;
  check(d.cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

/// Hopper and later have instructions that only the architecture's own "a" target offers.
std::string arch_name(int capability) {
  return fmt::format("sm_{}{}", capability, capability >= 90 ? "a" : "");
}

DeviceInfo describe(const cuda::Driver& d, int ordinal) {
  DeviceInfo info;
  info.name = fmt::format("cuda:{}", ordinal);
  info.cuda = true;
  cuda::DeviceHandle device = 0;
  check(d.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  std::array<char, 256> name{};
  check(d.cuDeviceGetName(name.data(), static_cast<int>(name.size()), device), "cuDeviceGetName");
  info.model = name.data();
  std::size_t bytes = 0;
  check(d.cuDeviceTotalMem(&bytes, device), "cuDeviceTotalMem");
  info.memory_bytes = static_cast<std::int64_t>(bytes);
  info.units = attribute(d, device, cuda::kMultiprocessorCount);
  info.clock_ghz = attribute(d, device, cuda::kClockRateKhz) * 1e-6;
  const double memory_clock_hz = attribute(d, device, cuda::kMemoryClockKhz) * 1e3;
  const double bus_bytes = attribute(d, device, cuda::kMemoryBusWidthBits) / 8.0;
  info.peak_bytes_per_s = 2.0 * memory_clock_hz * bus_bytes;  // two transfers per clock
  const int capability = 10 * attribute(d, device, cuda::kComputeCapabilityMajor) +
                         attribute(d, device, cuda::kComputeCapabilityMinor);
  info.arch = arch_name(capability);
  int version = 0;
  check(d.cuDriverGetVersion(&version), "cuDriverGetVersion");
  info.driver = fmt::format("{}.{}", version / 1000, version % 1000 / 10);
  info.key = fmt::format("{}, {} SMs, {:.0f} MHz, memory {:.0f} MHz x {:.0f} bit, {} GiB",
                         info.model, info.units, info.clock_ghz * 1e3, memory_clock_hz * 1e-6,
                         bus_bytes * 8, bytes >> 30);
  if (capability < 80)
    info.problem =
        fmt::format("{} is {}; CUDA templates need sm_80 or newer", info.model, info.arch);
  return info;
}

/// Makes a context current for a scope; costs one cheap query when it already is.
class Current {
 public:
  Current(const cuda::Driver& d, cuda::Context context) : driver_(d) {
    check(d.cuCtxGetCurrent(&previous_), "cuCtxGetCurrent");
    changed_ = previous_ != context;
    if (changed_) check(d.cuCtxSetCurrent(context), "cuCtxSetCurrent");
  }
  ~Current() {
    if (changed_) driver_.cuCtxSetCurrent(previous_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const cuda::Driver& driver_;
  cuda::Context previous_ = nullptr;
  bool changed_ = false;
};

/// The primary context, kept for as long as anything of the device is alive.
struct PrimaryContext {
  const cuda::Driver& driver;
  cuda::DeviceHandle device = 0;
  cuda::Context context = nullptr;

  explicit PrimaryContext(const cuda::Driver& d, int ordinal) : driver(d) {
    check(d.cuDeviceGet(&device, ordinal), "cuDeviceGet");
    check(d.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  }
  ~PrimaryContext() { driver.cuDevicePrimaryCtxRelease(device); }
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
};

class CudaKernel final : public Kernel {
 public:
  CudaKernel(std::shared_ptr<PrimaryContext> context, const Artifact& artifact,
             const Geometry& block)
      : context_(std::move(context)) {
    const cuda::Driver& d = context_->driver;
    const Current current(d, context_->context);
    check(d.cuLibraryLoadData(&library_, artifact.code.data(), nullptr, nullptr, 0, nullptr,
                              nullptr, 0),
          "cuLibraryLoadData");
    try {
      resolve(artifact, block);
    } catch (...) {
      d.cuLibraryUnload(library_);
      throw;
    }
  }
  ~CudaKernel() override {
    cuda::Context previous = nullptr;
    const cuda::Driver& d = context_->driver;
    d.cuCtxGetCurrent(&previous);
    d.cuCtxSetCurrent(context_->context);
    d.cuLibraryUnload(library_);
    d.cuCtxSetCurrent(previous);
  }
  CudaKernel(const CudaKernel&) = delete;
  CudaKernel& operator=(const CudaKernel&) = delete;

  void launch(const Geometry& geometry, void* const* arguments, std::size_t count,
              const Extents& extents, Stream stream) const override {
    if (geometry.grid[0] == 0 || geometry.grid[1] == 0 || geometry.grid[2] == 0) return;
    std::array<void*, kMaxArguments + 1> parameters;
    for (std::size_t i = 0; i < count; ++i)
      parameters[i] = const_cast<void*>(static_cast<const void*>(&arguments[i]));
    parameters[count] = const_cast<Extents*>(&extents);
    const cuda::Driver& d = context_->driver;
    const Current current(d, context_->context);
    check(d.cuLaunchKernel(
              function_, static_cast<unsigned>(geometry.grid[0]),
              static_cast<unsigned>(geometry.grid[1]), static_cast<unsigned>(geometry.grid[2]),
              static_cast<unsigned>(geometry.threads), 1, 1,
              static_cast<unsigned>(geometry.shared_bytes), stream, parameters.data(), nullptr),
          "cuLaunchKernel");
  }

 private:
  /// Resolving the function loads the code now, whatever CUDA_MODULE_LOADING says.
  void resolve(const Artifact& artifact, const Geometry& block) {
    const cuda::Driver& d = context_->driver;
    cuda::KernelHandle kernel = nullptr;
    check(d.cuLibraryGetKernel(&kernel, library_, artifact.entry.c_str()), "cuLibraryGetKernel");
    check(d.cuKernelGetFunction(&function_, kernel), "cuKernelGetFunction");
    int threads = 0;
    check(d.cuFuncGetAttribute(&threads, cuda::kMaxThreadsPerBlock, function_),
          "cuFuncGetAttribute");
    if (block.threads > threads)
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("{} with {} asks for {} threads a block; its registers allow {}",
                              artifact.template_id, artifact.config, block.threads, threads));
    if (block.shared_bytes > 0) {
      const cuda::Result result = d.cuFuncSetAttribute(function_, cuda::kMaxDynamicSharedBytes,
                                                       static_cast<int>(block.shared_bytes));
      if (result != 0)
        throw Error(ErrorKind::kUnavailable,
                    fmt::format("{} with {} asks for {} bytes of shared memory a block: {}",
                                artifact.template_id, artifact.config, block.shared_bytes,
                                d.describe(result)));
    }
  }

  std::shared_ptr<PrimaryContext> context_;
  cuda::Library library_ = nullptr;
  cuda::Function function_ = nullptr;
};

class CudaTimer final : public Timer {
 public:
  explicit CudaTimer(std::shared_ptr<PrimaryContext> context) : context_(std::move(context)) {
    const Current current(driver(), context_->context);
    check(driver().cuEventCreate(&start_, 0), "cuEventCreate");
    check(driver().cuEventCreate(&stop_, 0), "cuEventCreate");
  }
  ~CudaTimer() override {
    driver().cuEventDestroy(start_);
    driver().cuEventDestroy(stop_);
  }
  CudaTimer(const CudaTimer&) = delete;
  CudaTimer& operator=(const CudaTimer&) = delete;

  void start(Stream stream) override { record(start_, stream); }
  void stop(Stream stream) override { record(stop_, stream); }
  double elapsed_us() override {
    const Current current(driver(), context_->context);
    check(driver().cuEventSynchronize(stop_), "cuEventSynchronize");
    float milliseconds = 0;
    check(driver().cuEventElapsedTime(&milliseconds, start_, stop_), "cuEventElapsedTime");
    return milliseconds * 1e3;
  }

 private:
  const cuda::Driver& driver() const { return context_->driver; }
  void record(cuda::Event event, Stream stream) {
    const Current current(driver(), context_->context);
    check(driver().cuEventRecord(event, stream), "cuEventRecord");
  }

  std::shared_ptr<PrimaryContext> context_;
  cuda::Event start_ = nullptr;
  cuda::Event stop_ = nullptr;
};

class CudaReplay final : public Replay {
 public:
  CudaReplay(std::shared_ptr<PrimaryContext> context, cuda::Graph graph)
      : context_(std::move(context)) {
    const cuda::Result result = context_->driver.cuGraphInstantiateWithFlags(&exec_, graph, 0);
    context_->driver.cuGraphDestroy(graph);
    check(result, "cuGraphInstantiateWithFlags");
  }
  ~CudaReplay() override { context_->driver.cuGraphExecDestroy(exec_); }
  CudaReplay(const CudaReplay&) = delete;
  CudaReplay& operator=(const CudaReplay&) = delete;

  void launch(Stream stream) override {
    const Current current(context_->driver, context_->context);
    check(context_->driver.cuGraphLaunch(exec_, stream), "cuGraphLaunch");
  }

 private:
  std::shared_ptr<PrimaryContext> context_;
  cuda::GraphExec exec_ = nullptr;
};

class CudaDevice final : public DeviceImpl {
 public:
  explicit CudaDevice(int ordinal) : driver_(driver_or_throw()) {
    info_ = describe(driver_, ordinal);
    if (!info_.problem.empty()) throw Error(ErrorKind::kUnavailable, info_.problem);
    context_ = std::make_shared<PrimaryContext>(driver_, ordinal);
    target_ = cuda_target(info_.arch);
    target_.limits.multiprocessors = info_.units;
    target_.limits.shared_bytes =
        attribute(driver_, context_->device, cuda::kMaxSharedMemoryPerBlockOptin);
    cache_bytes_ = attribute(driver_, context_->device, cuda::kL2CacheBytes);
  }

  void* allocate(std::size_t bytes) override {
    const Current current(driver_, context_->context);
    cuda::DevicePointer pointer = 0;
    const cuda::Result result = driver_.cuMemAlloc(&pointer, bytes == 0 ? 1 : bytes);
    if (result != 0)
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("{} bytes of memory cannot be allocated on {}: {}", bytes, info_.name,
                              driver_.describe(result)));
    return reinterpret_cast<void*>(pointer);
  }
  void free(void* pointer) noexcept override {
    cuda::Context previous = nullptr;
    driver_.cuCtxGetCurrent(&previous);
    driver_.cuCtxSetCurrent(context_->context);
    driver_.cuMemFree(address(pointer));
    driver_.cuCtxSetCurrent(previous);
  }
  void copy_in(void* device, const void* host, std::size_t bytes) override {
    if (bytes == 0) return;
    const Current current(driver_, context_->context);
    check(driver_.cuMemcpyHtoD(address(device), host, bytes), "cuMemcpyHtoD");
  }
  void copy_out(void* host, const void* device, std::size_t bytes) override {
    if (bytes == 0) return;
    const Current current(driver_, context_->context);
    check(driver_.cuMemcpyDtoH(host, address(device), bytes), "cuMemcpyDtoH");
  }
  void fill(void* device, unsigned char byte, std::size_t bytes, Stream stream) override {
    if (bytes == 0) return;
    const Current current(driver_, context_->context);
    check(driver_.cuMemsetD8Async(address(device), byte, bytes, stream), "cuMemsetD8Async");
  }
  void synchronize(Stream stream) override {
    const Current current(driver_, context_->context);
    check(driver_.cuStreamSynchronize(stream), "cuStreamSynchronize");
  }
  std::shared_ptr<const Kernel> load(const Artifact& artifact, const Geometry& block) override {
    return std::make_shared<CudaKernel>(context_, artifact, block);
  }
  std::unique_ptr<Timer> make_timer() override { return std::make_unique<CudaTimer>(context_); }
  std::shared_ptr<void> make_stream() override {
    const Current current(driver_, context_->context);
    cuda::StreamHandle stream = nullptr;
    check(driver_.cuStreamCreate(&stream, cuda::kStreamNonBlocking), "cuStreamCreate");
    return {stream, [context = context_](void* s) { context->driver.cuStreamDestroy(s); }};
  }
  std::unique_ptr<Replay> capture(const std::function<void(Stream)>& record) override {
    const Current current(driver_, context_->context);
    const std::shared_ptr<void> stream = make_stream();
    check(driver_.cuStreamBeginCapture(stream.get(), cuda::kCaptureModeThreadLocal),
          "cuStreamBeginCapture");
    cuda::Graph graph = nullptr;
    try {
      record(stream.get());
    } catch (...) {
      driver_.cuStreamEndCapture(stream.get(), &graph);
      if (graph != nullptr) driver_.cuGraphDestroy(graph);
      throw;
    }
    check(driver_.cuStreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
    return std::make_unique<CudaReplay>(context_, graph);
  }
  std::int64_t cache_bytes() const override { return cache_bytes_; }

 private:
  static cuda::DevicePointer address(const void* pointer) {
    return reinterpret_cast<cuda::DevicePointer>(pointer);
  }

  const cuda::Driver& driver_;
  std::shared_ptr<PrimaryContext> context_;
  std::int64_t cache_bytes_ = 0;
};

}  // namespace

std::shared_ptr<DeviceImpl> open_cuda_device(int ordinal) {
  const cuda::Driver& d = driver_or_throw();
  int count = 0;
  check(d.cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (ordinal >= count)
    throw Error(ErrorKind::kUnavailable,
                fmt::format("device cuda:{} does not exist; this machine has {} GPU{}", ordinal,
                            count, count == 1 ? "" : "s"));
  return std::make_shared<CudaDevice>(ordinal);
}

std::vector<DeviceInfo> cuda_device_infos() {
  std::vector<DeviceInfo> infos;
  std::string problem;
  const cuda::Driver* d = cuda::driver(&problem);
  if (d == nullptr) {
    DeviceInfo missing;
    missing.name = "cuda";
    missing.cuda = true;
    missing.problem = problem;
    infos.push_back(std::move(missing));
    return infos;
  }
  int count = 0;
  if (d->cuDeviceGetCount(&count) != 0) count = 0;
  for (int i = 0; i < count; ++i) infos.push_back(describe(*d, i));
  return infos;
}

}  // namespace wyvern
