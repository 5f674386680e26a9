#include "runtime/devices/device_impl.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <array>
#include <charconv>

#include "runtime/devices/cuda/context.hpp"
#include "runtime/devices/cuda/kernel.hpp"
#include "runtime/devices/cuda/nvml.hpp"
#include "runtime/devices/cuda/rates.hpp"
#include "runtime/devices/cuda/tensor_map.hpp"
#include "runtime/devices/cuda/timer.hpp"

namespace wyvern {
namespace {

using cuda::attribute;
using cuda::check;
using cuda::Current;

/// Hopper and later have instructions that only the architecture's own "a" target offers.
std::string arch_name(int capability) {
  return fmt::format("sm_{}{}", capability, capability >= 90 ? "a" : "");
}

DeviceInfo describe(const cuda::Driver& d, int ordinal) {
  DeviceInfo info;
  info.name = fmt::format("cuda:{}", ordinal);
  info.kind = to_string(DeviceKind::cuda);
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
  // The driver's compiler and scheduler change with its own version, which CUDA's does not tell.
  if (const std::string own = cuda::driver_version(); !own.empty())
    info.driver += fmt::format(" ({})", own);
  info.key = fmt::format("{}, {} SMs, {:.0f} MHz, memory {:.0f} MHz x {:.0f} bit, {} GiB",
                         info.model, info.units, info.clock_ghz * 1e3, memory_clock_hz * 1e-6,
                         bus_bytes * 8, bytes >> 30);
  if (capability < 80)
    info.problem =
        fmt::format("{} is {}; CUDA templates need sm_80 or newer", info.model, info.arch);
  return info;
}

/// "GPU-1b2c3d4e-...", as nvidia-smi writes it; empty where the driver does not tell.
std::string uuid_of(const cuda::Driver& d, cuda::DeviceHandle device) {
  std::array<unsigned char, 16> bytes{};
  if (d.cuDeviceGetUuid == nullptr || d.cuDeviceGetUuid(&bytes, device) != 0) return {};
  std::string text = "GPU";
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (i == 0 || (i >= 4 && i <= 10 && i % 2 == 0)) text += '-';
    text += fmt::format("{:02x}", bytes[i]);
  }
  return text;
}

class CudaDevice final : public DeviceImpl {
 public:
  explicit CudaDevice(int ordinal) : driver_(cuda::driver_or_throw()) {
    info_ = describe(driver_, ordinal);
    if (!info_.problem.empty()) throw Error(ErrorKind::kUnavailable, info_.problem);
    context_ = std::make_shared<cuda::PrimaryContext>(driver_, ordinal);
    target_ = cuda_target(info_.arch);
    target_.limits.max_cluster = context_->max_cluster;
    target_.limits.tensor_copies = target_.limits.tensor_copies && cuda::has_tensor_maps(driver_);
    target_.limits.multiprocessors = info_.units;
    target_.limits.bytes_per_us = info_.peak_bytes_per_s * 1e-6;
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
    return cuda::load_kernel(context_, artifact, block);
  }
  TensorMap encode(const TiledView& view, DType dtype) const override {
    const Current current(driver_, context_->context);  // the driver encodes for its device
    return cuda::encode_tiled(driver_, view, dtype);
  }
  std::unique_ptr<Timer> make_timer() override { return cuda::make_timer(context_); }
  std::shared_ptr<void> make_stream() override { return cuda::make_stream(context_); }
  std::unique_ptr<Replay> capture(const std::function<void(Stream)>& record) override {
    return cuda::capture(context_, record);
  }
  std::int64_t cache_bytes() const override { return cache_bytes_; }
  bool host_memory() const override { return false; }
  Measuring measuring() const override {
    return {
        .samples = 20, .samples_us = 20e3, .compare_s = 1, .cold = true, .beside_compilers = true};
  }
  Rates rates() const override { return cuda::rates(info_); }
  DeviceState state() const override { return cuda::gpu_state(uuid_of(driver_, context_->device)); }

 private:
  static cuda::DevicePointer address(const void* pointer) {
    return reinterpret_cast<cuda::DevicePointer>(pointer);
  }

  const cuda::Driver& driver_;
  std::shared_ptr<cuda::PrimaryContext> context_;
  std::int64_t cache_bytes_ = 0;
};

/// The entry of devices that cannot even be counted.
DeviceInfo broken(std::string problem) {
  DeviceInfo info;
  info.name = info.kind = to_string(DeviceKind::cuda);
  info.cuda = true;
  info.problem = std::move(problem);
  return info;
}

class CudaDevices final : public DeviceProvider {
 public:
  std::string_view names() const override { return "cuda:N"; }

  std::optional<int> ordinal(std::string_view name) const override {
    constexpr std::string_view kPrefix = "cuda:";
    if (name == "cuda") return 0;
    if (!name.starts_with(kPrefix)) return {};
    name.remove_prefix(kPrefix.size());
    int number = -1;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error != std::errc{} || end != name.data() + name.size() || number < 0) return {};
    return number;
  }

  std::vector<DeviceInfo> list() const override {
    std::vector<DeviceInfo> infos;
    try {
      const cuda::Driver& d = cuda::driver_or_throw();
      int count = 0;
      if (d.cuDeviceGetCount(&count) != 0) count = 0;
      for (int i = 0; i < count; ++i) infos.push_back(describe(d, i));
    } catch (const Error& error) {
      infos = {broken(error.what())};
    }
    return infos;
  }

  std::shared_ptr<DeviceImpl> open(int ordinal) const override {
    const cuda::Driver& d = cuda::driver_or_throw();
    int count = 0;
    check(d.cuDeviceGetCount(&count), "cuDeviceGetCount");
    if (ordinal >= count)
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("device cuda:{} does not exist; this machine has {} GPU{}", ordinal,
                              count, count == 1 ? "" : "s"));
    return std::make_shared<CudaDevice>(ordinal);
  }
};

}  // namespace

const DeviceProvider& cuda_devices() {
  // Never destroyed: the last threads may ask it while the process ends.
  static const CudaDevices& devices = *new CudaDevices;
  return devices;
}

}  // namespace wyvern
