#include "tests/emulator/device.hpp"

#include <wyvern/error.hpp>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "runtime/bind.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "tests/emulator/emulator.hpp"

namespace wyvern::emulator {
namespace {

class EmulatedKernel final : public Kernel {
 public:
  EmulatedKernel(const Template& source, Constants constants, Config config)
      : source_(source), constants_(std::move(constants)), config_(std::move(config)) {}

  void launch(const Geometry& geometry, std::span<void* const> arguments,
              std::span<const BoundTensorMap> /*maps*/, std::span<const std::int64_t> strides,
              const Extents& extents, Stream /*stream*/) const override {
    const bool odd = launches_++ % 2 != 0;
    emulate(source_, constants_, config_, geometry, extents, arguments, strides,
            odd ? Schedule::last_warp : Schedule::first_warp);
  }

 private:
  const Template& source_;
  Constants constants_;
  Config config_;
  mutable std::atomic<unsigned> launches_{0};
};

[[noreturn]] void unsupported(const char* what) {
  throw Error(ErrorKind::kUnavailable, std::string("the emulated device ") + what);
}

class EmulatedDevice final : public DeviceImpl {
 public:
  explicit EmulatedDevice(int multiprocessors) {
    target_ = cuda_target("sm_90a");
    target_.limits.multiprocessors = multiprocessors;
    info_.name = "cuda:0";
    info_.kind = to_string(target_.device);
    info_.cuda = true;
    info_.model = "emulated GPU";
    info_.arch = target_.arch;
    info_.units = 1;
  }

  void* allocate(std::size_t bytes) override {
    constexpr std::size_t kAlignment = 256;
    const std::size_t rounded = std::max<std::size_t>((bytes + kAlignment - 1) / kAlignment, 1);
    return std::aligned_alloc(kAlignment, rounded * kAlignment);
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
  std::shared_ptr<const Kernel> load(const Artifact&, const Geometry&) override {
    unsupported("loads no artifacts");
  }
  /// emulate() makes the maps of its launches itself, as it has the addresses.
  TensorMap encode(const TiledView&, DType) const override { return {}; }
  std::unique_ptr<Timer> make_timer() override { unsupported("has no clock"); }
  std::shared_ptr<void> make_stream() override { return {}; }
  std::unique_ptr<Replay> capture(const std::function<void(Stream)>&) override {
    unsupported("has no graphs");
  }
  std::int64_t cache_bytes() const override { return 0; }
  bool host_memory() const override { return false; }
  Measuring measuring() const override { return {}; }
  Rates rates() const override { return {}; }
};

std::shared_ptr<OperatorImpl> with_emulated_kernels(std::shared_ptr<OperatorImpl> op) {
  for (BoundStep& step : op->steps)
    step.kernel =
        std::make_shared<EmulatedKernel>(*step.source_template, step.constants, step.step.config);
  return op;
}

}  // namespace

Device open_emulated_device(int multiprocessors) {
  return Device(std::make_shared<EmulatedDevice>(multiprocessors));
}

bool is_emulated(const Device& device) {
  return dynamic_cast<const EmulatedDevice*>(&device.impl()) != nullptr;
}

Operator prepare(const Device& device, const Problem& problem) {
  return prepare(device, problem, default_plan(problem, device.impl().target()));
}

Operator prepare(const Device& device, const Problem& problem, const Plan& plan) {
  return Operator(with_emulated_kernels(bind_operator(device, problem, plan)));
}

Stage prepare_stage(const Device& device, const PlanStep& step, const Problem& problem) {
  return Stage(with_emulated_kernels(bind_stage(device, problem, step)));
}

}  // namespace wyvern::emulator
