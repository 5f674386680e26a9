// A device as the runtime and the tuner see it: memory, streams, loading, timing.
#pragma once

#include <wyvern/device.hpp>

#include <memory>
#include <string>
#include <string_view>

#include "compiler/compiler.hpp"

namespace wyvern {

/// Loaded code, ready to launch. Immutable; launches from several threads are safe.
class Kernel {
 public:
  virtual ~Kernel() = default;
  /// Enqueues one grid. `arguments` holds the contract's pointers in order; a grid with a zero
  /// dimension launches nothing. Allocates nothing, takes no lock.
  virtual void launch(const Geometry& geometry, void* const* arguments, std::size_t count,
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
  /// will get: threads per block and dynamic shared memory; throws Error(kUnavailable) when the
  /// device cannot launch it so, naming the figure.
  virtual std::shared_ptr<const Kernel> load(const Artifact& artifact, const Geometry& block) = 0;

  virtual std::unique_ptr<Timer> make_timer() = 0;
  /// A stream of its own that does not wait for the default stream; released with the pointer.
  virtual std::shared_ptr<void> make_stream() = 0;
  /// Captures what `record` enqueues on the stream it is given.
  virtual std::unique_ptr<Replay> capture(const std::function<void(Stream)>& record) = 0;
  /// Bytes of the last-level cache that a cold measurement must displace.
  virtual std::int64_t cache_bytes() const = 0;

 protected:
  DeviceInfo info_;
  Target target_;
};

/// Devices of each kind; `open` throws as Device::open does.
std::shared_ptr<DeviceImpl> open_cpu_device();
DeviceInfo cpu_device_info();
std::shared_ptr<DeviceImpl> open_cuda_device(int ordinal);
std::vector<DeviceInfo> cuda_device_infos();

}  // namespace wyvern
