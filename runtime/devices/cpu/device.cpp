#include "runtime/devices/device_impl.hpp"

#include <wyvern/error.hpp>

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>

#include "runtime/devices/cpu/memory.hpp"
#include "runtime/devices/cpu/rates.hpp"
#include "runtime/devices/cpu/shared_object.hpp"
#include "runtime/devices/cpu/thread_pool.hpp"
#include "runtime/operator_impl.hpp"

namespace wyvern {
namespace {

constexpr std::size_t kAlignment = 256;
/// Smaller allocations skip the check of available memory.
constexpr std::size_t kMuch = std::size_t{64} << 20;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// The value of the first line "name : value" of /proc/cpuinfo.
std::string cpuinfo(std::string_view name) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, name.size(), name) != 0) continue;
    const std::size_t start = line.find_first_not_of(" \t", colon + 1);
    return start == std::string::npos ? std::string() : line.substr(start);
  }
  return {};
}

std::int64_t last_level_cache_bytes() {
  for (const int level : {_SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE})
    if (const long bytes = sysconf(level); bytes > 0) return bytes;
  return std::int64_t{32} << 20;
}

/// A path to an open descriptor that no other call returns, whatever the numbers: the loader
/// identifies libraries by name, and would mistake a library under a reused descriptor number for
/// the one that was loaded under it before. The bits of a count choose between "/./" and "//", so
/// that paths to one number differ.
std::string unique_path(int descriptor) {
  static std::atomic<std::uint64_t> loads{0};
  std::string path = "/proc/self/fd";
  for (std::uint64_t count = ++loads; count != 0; count >>= 1)
    path += (count & 1) != 0 ? "/./" : "//";
  return path + std::to_string(descriptor);
}

/// Code mapped from memory: the dynamic loader reads a file descriptor that no path leads to, which
/// is closed once the code is mapped.
class CpuKernel final : public Kernel {
 public:
  CpuKernel(std::shared_ptr<ThreadPool> pool, const Artifact& artifact) : pool_(std::move(pool)) {
    if (const std::string problem = shared_object_problem(artifact.code); !problem.empty())
      fail(artifact, problem.c_str());
    const int file = memfd_create("wyvern-kernel", MFD_CLOEXEC);
    if (file < 0) fail(artifact, std::strerror(errno));
    const bool written = ::write(file, artifact.code.data(), artifact.code.size()) ==
                         static_cast<ssize_t>(artifact.code.size());
    if (written) library_ = dlopen(unique_path(file).c_str(), RTLD_NOW | RTLD_LOCAL);
    ::close(file);
    if (library_ == nullptr) fail(artifact, written ? dlerror() : "memory is full");
    entry_ = reinterpret_cast<Entry>(dlsym(library_, artifact.entry.c_str()));
    if (entry_ == nullptr) {
      dlclose(library_);
      fail(artifact, "its entry point is missing");
    }
  }
  ~CpuKernel() override { dlclose(library_); }
  CpuKernel(const CpuKernel&) = delete;
  CpuKernel& operator=(const CpuKernel&) = delete;

  void launch(const Geometry& geometry, std::span<void* const> arguments,
              std::span<const BoundTensorMap> /*maps*/, std::span<const std::int64_t> strides,
              const Extents& extents, Stream /*stream*/) const override {
    std::array<void*, kMaxArguments + kMaxStrided> all;  // strides follow the tensors
    auto end = std::copy(arguments.begin(), arguments.end(), all.begin());
    for (const std::int64_t& stride : strides) *end++ = const_cast<std::int64_t*>(&stride);
    const Call call{entry_, &geometry, all.data(), &extents};
    pool_->run(geometry.grid[0] * geometry.grid[1] * geometry.grid[2],
               static_cast<std::size_t>(geometry.shared_bytes), &CpuKernel::run_block, &call);
  }

 private:
  using Entry = void (*)(void* const*, const Extents*, const long*, void*);
  struct Call {
    Entry entry;
    const Geometry* geometry;
    void* const* arguments;
    const Extents* extents;
  };

  static void run_block(const void* context, std::int64_t index, void* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    const auto& grid = call.geometry->grid;
    const long block[3] = {index % grid[0], index / grid[0] % grid[1], index / (grid[0] * grid[1])};
    call.entry(call.arguments, call.extents, block, scratch);
  }

  [[noreturn]] static void fail(const Artifact& artifact, const char* reason) {
    throw Error(ErrorKind::kUnavailable,
                fmt::format("{} with {} cannot be loaded: {}", artifact.template_id,
                            artifact.config, reason == nullptr ? "unknown reason" : reason));
  }

  std::shared_ptr<ThreadPool> pool_;
  void* library_ = nullptr;
  Entry entry_ = nullptr;
};

class CpuTimer final : public Timer {
 public:
  void start(Stream) override { start_ = Clock::now(); }
  void stop(Stream) override { stop_ = Clock::now(); }
  double elapsed_us() override {
    return std::chrono::duration<double, std::micro>(stop_ - start_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_, stop_;
};

class CpuReplay final : public Replay {
 public:
  explicit CpuReplay(std::function<void(Stream)> record) : record_(std::move(record)) {}
  void launch(Stream stream) override { record_(stream); }

 private:
  std::function<void(Stream)> record_;
};

DeviceInfo cpu_device_info() {
  DeviceInfo info;
  info.name = info.kind = to_string(DeviceKind::cpu);
  info.model = cpuinfo("model name");
  if (info.model.empty()) info.model = "CPU";
  const Target& target = host_target();
  info.arch = target.arch;
  info.units = static_cast<int>(ThreadPool::available_threads());
  info.memory_bytes = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  info.driver = target.name();
  info.key = fmt::format("{}, {}, {} threads", info.model, target.name(), info.units);
  return info;
}

class CpuDevice final : public DeviceImpl {
 public:
  CpuDevice() : pool_(std::make_shared<ThreadPool>(ThreadPool::available_threads())) {
    info_ = cpu_device_info();
    target_ = host_target();
    cache_bytes_ = last_level_cache_bytes();
  }

  void* allocate(std::size_t bytes) override {
    const std::size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
    // More than the address space has would be rounded up past the end of the type.
    const bool possible = bytes <= static_cast<std::size_t>(std::numeric_limits<ssize_t>::max()) &&
                          (bytes < kMuch || bytes <= available_memory());
    const std::size_t rounded =
        possible ? std::max<std::size_t>((bytes + alignment - 1) / alignment, 1) : 0;
    void* pointer = possible ? std::aligned_alloc(alignment, rounded * alignment) : nullptr;
    if (pointer == nullptr)
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("{} bytes of memory cannot be allocated on the CPU", bytes));
    // Tiles of many rows touch many pages at once. Only advice: a kernel without it runs as well.
    if (alignment == kHugePage) madvise(pointer, rounded * alignment, MADV_HUGEPAGE);
    return pointer;
  }
  void free(void* pointer) noexcept override { std::free(pointer); }
  void copy_in(void* device, const void* host, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(device, host, bytes);
  }
  void copy_out(void* host, const void* device, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(host, device, bytes);
  }
  void fill(void* device, unsigned char byte, std::size_t bytes, Stream) override {
    if (bytes != 0) std::memset(device, byte, bytes);
  }
  void synchronize(Stream) override {}
  std::shared_ptr<const Kernel> load(const Artifact& artifact, const Geometry&) override {
    return std::make_shared<CpuKernel>(pool_, artifact);
  }
  std::unique_ptr<Timer> make_timer() override { return std::make_unique<CpuTimer>(); }
  std::shared_ptr<void> make_stream() override { return {}; }
  std::unique_ptr<Replay> capture(const std::function<void(Stream)>& record) override {
    return std::make_unique<CpuReplay>(record);
  }
  std::int64_t cache_bytes() const override { return cache_bytes_; }
  bool host_memory() const override { return true; }
  Measuring measuring() const override {
    return {.samples = 7,
            .samples_us = 300e3,
            .compare_s = 6,
            .cold = false,
            .beside_compilers = false};
  }
  Rates rates() const override { return measure_cpu_rates(info_.units); }

 private:
  std::shared_ptr<ThreadPool> pool_;
  std::int64_t cache_bytes_ = 0;
};

class CpuDevices final : public DeviceProvider {
 public:
  std::string_view names() const override { return "cpu"; }
  std::optional<int> ordinal(std::string_view name) const override {
    if (name != names()) return {};
    return 0;
  }
  std::vector<DeviceInfo> list() const override { return {cpu_device_info()}; }
  std::shared_ptr<DeviceImpl> open(int) const override { return std::make_shared<CpuDevice>(); }
};

}  // namespace

const DeviceProvider& cpu_devices() {
  // Never destroyed: the last threads may ask it while the process ends.
  static const CpuDevices& devices = *new CpuDevices;
  return devices;
}

}  // namespace wyvern
