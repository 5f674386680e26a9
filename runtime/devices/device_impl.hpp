// A device as the runtime and the tuner see it: memory, streams, loading, timing. A folder of
// runtime/devices/ implements it for one kind; runtime/device.cpp lists the kinds.
#pragma once

#include <wyvern/device.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compiler/compiler.hpp"
#include "templates/device/tensor_map.hpp"

namespace wyvern {

/// A tensor map of a launch, complete but for the tensor's address, which each launch sets.
struct BoundTensorMap {
  std::size_t argument = 0;  ///< which of the launch's arguments the tensor is
  TensorMap map{};
};

/// Loaded code, ready to launch. Immutable; launches from several threads are safe.
class Kernel {
 public:
  virtual ~Kernel() = default;
  /// Enqueues one grid. `arguments` holds the contract's pointers in order, `maps` the results of
  /// encode() for the template's tensor maps, `strides` the row strides of its strided tensors in
  /// order; a grid with a zero dimension launches nothing. Allocates nothing, takes no lock.
  virtual void launch(const Geometry& geometry, std::span<void* const> arguments,
                      std::span<const BoundTensorMap> maps, std::span<const std::int64_t> strides,
                      const Extents& extents, Stream stream) const = 0;
};

/// Measures the time between two points of a stream; device events on CUDA, a steady clock on the
/// CPU. One measurement at a time; not thread-safe.
class Timer {
 public:
  virtual ~Timer() = default;
  virtual void start(Stream stream) = 0;
  virtual void stop(Stream stream) = 0;
  /// Waits for stop() to be reached.
  virtual double elapsed_us() = 0;
};

/// A recorded sequence of launches that is replayed as one (a CUDA graph; a callback on the CPU).
class Replay {
 public:
  virtual ~Replay() = default;
  virtual void launch(Stream stream) = 0;
};

/// How many measurements a kind of device needs, for the tuner.
struct Measuring {
  std::size_t samples = 1;  ///< most samples of one step
  double samples_us = 0;    ///< and most time for them
  double compare_s = 0;     ///< most time for comparing whole plans
  bool cold = false;        ///< samples of a step start from a flushed cache
  /// Compilers that run on the host do not disturb measurements.
  bool beside_compilers = false;
};

/// A device's peak rates, and their source.
struct Rates {
  double bytes_per_s = 0;         ///< device memory, counting reads and writes
  double matrix_flops_per_s = 0;  ///< products of 16-bit matrices; 0: it has no units for them
  double scalar_flops_per_s = 0;  ///< fp32 multiply-adds without tensor cores
  /// Rates of data that the caches hold, by its bytes, ascending; empty: not known.
  std::vector<std::pair<double, double>> cached;
  std::string basis;
};

/// A device's present state as reported by its driver; 0 or empty: not reported.
struct DeviceState {
  std::string unit;      ///< which one of its model it is: a GPU's UUID
  double clock_mhz = 0;  ///< of its multiprocessors
  double memory_clock_mhz = 0;
  double power_limit_w = 0;
};

class DeviceImpl {
 public:
  virtual ~DeviceImpl() = default;

  const DeviceInfo& info() const { return info_; }
  const Target& target() const { return target_; }

  virtual void* allocate(std::size_t bytes) = 0;
  virtual void free(void* pointer) noexcept = 0;
  virtual void copy_in(void* device, const void* host, std::size_t bytes) = 0;
  virtual void copy_out(void* host, const void* device, std::size_t bytes) = 0;
  virtual void fill(void* device, unsigned char byte, std::size_t bytes, Stream stream) = 0;
  virtual void synchronize(Stream stream) = 0;

  /// Loads code at once (nothing is left for the first launch). `block` is the largest launch it
  /// will get: threads per block and dynamic shared memory; throws Error(kUnavailable) that names
  /// the figure when the device cannot launch that.
  virtual std::shared_ptr<const Kernel> load(const Artifact& artifact, const Geometry& block) = 0;

  /// The map of a view of a tensor whose address is not known yet. Throws Error(kUnavailable) on a
  /// device without TMA, Error(kBadInput) with the figures where the driver refuses them.
  /// Thread-safe.
  virtual TensorMap encode(const TiledView& view, DType dtype) const;

  virtual std::unique_ptr<Timer> make_timer() = 0;
  /// A stream of its own that does not wait for the default stream; released with the pointer.
  virtual std::shared_ptr<void> make_stream() = 0;
  /// Captures what `record` enqueues on the stream it is given.
  virtual std::unique_ptr<Replay> capture(const std::function<void(Stream)>& record) = 0;
  /// Bytes of the last-level cache that a cold measurement must displace.
  virtual std::int64_t cache_bytes() const = 0;

  /// Kernels work in the host's memory: the host may read their inputs when they are launched.
  virtual bool host_memory() const = 0;
  virtual Measuring measuring() const = 0;
  /// Measured, in about half a second, if they are not known.
  virtual Rates rates() const = 0;
  /// Asks the driver: not for a hot path. Thread-safe.
  virtual DeviceState state() const { return {}; }

 protected:
  DeviceInfo info_;
  Target target_;
};

/// The devices of one kind. Stateless, one object for the life of the process; thread-safe.
class DeviceProvider {
 public:
  virtual ~DeviceProvider() = default;
  /// The names of its devices, for messages: "cpu", "cuda:N".
  virtual std::string_view names() const = 0;
  /// The ordinal of the device of this name; nothing when the name is not of this kind.
  virtual std::optional<int> ordinal(std::string_view name) const = 0;
  /// The devices of this kind. Never throws: an unusable device is listed with its problem.
  virtual std::vector<DeviceInfo> list() const = 0;
  /// Throws Error(kUnavailable) when the device or its driver is missing.
  virtual std::shared_ptr<DeviceImpl> open(int ordinal) const = 0;
};

/// Every kind of device, the CPU first; Device::best() prefers the later.
std::span<const DeviceProvider* const> device_providers();

/// The provider that each folder defines.
const DeviceProvider& cpu_devices();
const DeviceProvider& cuda_devices();

}  // namespace wyvern
