// Devices: listing and opening them, their memory, streams and synchronization.
#pragma once

#include <wyvern/export.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern WYVERN_API {

/// A CUstream (null: the default stream). Ignored on the CPU, where every call is synchronous.
using Stream = void*;

struct DeviceInfo {
  std::string name;    ///< "cpu", "cuda:0"
  std::string kind;    ///< "cpu", "cuda"
  bool cuda = false;   ///< kind is "cuda"
  std::string model;   ///< "NVIDIA H200", or the processor's name
  std::string arch;    ///< "sm_90a"; on the CPU vendor, family and model: "genuineintel-6-143"
  std::string key;     ///< identifies the device in measurements: model, units, clocks, memory
  std::string driver;  ///< CUDA version and driver's: "13.0 (580.159)"; the CPU's target name
  int units = 0;       ///< multiprocessors, or threads used
  std::int64_t memory_bytes = 0;
  double clock_ghz = 0;         ///< boost clock
  double peak_bytes_per_s = 0;  ///< of device memory by its clock and width; 0: unknown
  std::string problem;          ///< empty when usable, else what is wrong and how to fix it
};

/// Every device of the machine, the CPU first. Never throws: a device or driver that is present but
/// unusable is listed with its problem.
[[nodiscard]] std::vector<DeviceInfo> list_devices();

class DeviceImpl;

/// A device of this process. A cheap handle; copies share. Thread-safe. The CUDA side uses the
/// device's primary context, the one PyTorch and the CUDA runtime use.
class Device {
 public:
  /// "cpu" or "cuda:N"; throws Error(kBadInput) for another spelling and Error(kUnavailable) when
  /// the device or its driver is missing.
  static Device open(std::string_view name);
  /// The first usable GPU, else the CPU.
  static Device best();

  [[nodiscard]] const DeviceInfo& info() const;

  /// Allocates uninitialized memory, aligned to 256 bytes. The last copy of the pointer frees it;
  /// until then the device stays open. Throws Error(kUnavailable) when there is too little memory.
  [[nodiscard]] std::shared_ptr<void> allocate(std::size_t bytes) const;
  /// Synchronous copies between host and device memory. They do not wait for non-blocking streams:
  /// synchronize() such a stream first. Throw Error(kBadInput), as fill() does, for a null pointer
  /// with a byte count above 0.
  void copy_in(void* device, const void* host, std::size_t bytes) const;
  void copy_out(void* host, const void* device, std::size_t bytes) const;
  /// Fills with a byte, ordered after `stream`.
  void fill(void* device, unsigned char byte, std::size_t bytes, Stream stream = nullptr) const;
  /// Waits for all work of the stream; throws Error(kUnavailable) when the device reports a fault.
  void synchronize(Stream stream = nullptr) const;

  DeviceImpl& impl() const { return *impl_; }
  explicit Device(std::shared_ptr<DeviceImpl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<DeviceImpl> impl_;
};

}  // namespace wyvern WYVERN_API
