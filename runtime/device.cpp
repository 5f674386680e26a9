#include <wyvern/device.hpp>
#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <map>
#include <utility>

#include "runtime/base/fork_guard.hpp"
#include "runtime/base/mutex.hpp"
#include "runtime/devices/device_impl.hpp"

namespace wyvern {
namespace {

/// One DeviceImpl per device and process, for as long as anything uses it.
std::shared_ptr<DeviceImpl> shared_device(const DeviceProvider& provider, int ordinal) {
  using Key = std::pair<const DeviceProvider*, int>;
  static Mutex mutex;
  // Never destroyed: the last threads may open devices while the process ends.
  static std::map<Key, std::weak_ptr<DeviceImpl>>& devices WYVERN_GUARDED_BY(mutex) =
      *new std::map<Key, std::weak_ptr<DeviceImpl>>;
  const NoFork no_fork;  // opening may load libraries and start threads
  const Lock lock(mutex);
  std::weak_ptr<DeviceImpl>& slot = devices[{&provider, ordinal}];
  std::shared_ptr<DeviceImpl> device = slot.lock();
  if (!device) {
    device = provider.open(ordinal);
    slot = device;
  }
  return device;
}

void check_pointer(std::string_view name, const void* pointer, std::size_t bytes) {
  if (pointer == nullptr && bytes != 0)
    throw Error(ErrorKind::kBadInput,
                fmt::format("{} is null; it must point to {} bytes", name, bytes));
}

}  // namespace

TensorMap DeviceImpl::encode(const TiledView& /*view*/, DType /*dtype*/) const {
  throw Error(ErrorKind::kUnavailable, fmt::format("{} has no TMA", info_.name));
}

std::span<const DeviceProvider* const> device_providers() {
  static const std::array<const DeviceProvider*, 2> all{&cpu_devices(), &cuda_devices()};
  return all;
}

std::vector<DeviceInfo> list_devices() {
  std::vector<DeviceInfo> infos;
  for (const DeviceProvider* provider : device_providers())
    for (DeviceInfo& info : provider->list()) infos.push_back(std::move(info));
  return infos;
}

Device Device::open(std::string_view name) {
  std::vector<std::string_view> names;
  for (const DeviceProvider* provider : device_providers()) {
    if (const std::optional<int> ordinal = provider->ordinal(name))
      return Device(shared_device(*provider, *ordinal));
    names.push_back(provider->names());
  }
  throw Error(ErrorKind::kBadInput,
              fmt::format("device is '{}'; it must be {}", name, fmt::join(names, " or ")));
}

Device Device::best() {
  const std::span<const DeviceProvider* const> all = device_providers();
  for (auto provider = all.rbegin(); provider != all.rend(); ++provider)
    for (const DeviceInfo& info : (*provider)->list())
      if (info.problem.empty()) return open(info.name);
  throw Error(ErrorKind::kUnavailable, "no device of this machine can be used");
}

const DeviceInfo& Device::info() const { return impl_->info(); }

std::shared_ptr<void> Device::allocate(std::size_t bytes) const {
  return {impl_->allocate(bytes), [impl = impl_](void* p) { impl->free(p); }};
}
void Device::copy_in(void* device, const void* host, std::size_t bytes) const {
  check_pointer("device", device, bytes);
  check_pointer("host", host, bytes);
  impl_->copy_in(device, host, bytes);
}
void Device::copy_out(void* host, const void* device, std::size_t bytes) const {
  check_pointer("host", host, bytes);
  check_pointer("device", device, bytes);
  impl_->copy_out(host, device, bytes);
}
void Device::fill(void* device, unsigned char byte, std::size_t bytes, Stream stream) const {
  check_pointer("device", device, bytes);
  impl_->fill(device, byte, bytes, stream);
}
void Device::synchronize(Stream stream) const { impl_->synchronize(stream); }

}  // namespace wyvern
