#include <wyvern/device.hpp>
#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <charconv>
#include <map>

#include "cache/mutex.hpp"
#include "runtime/device_impl.hpp"

namespace wyvern {
namespace {

/// The ordinal of "cuda:N", or -1.
int cuda_ordinal(std::string_view name) {
  constexpr std::string_view kPrefix = "cuda:";
  if (name == "cuda") return 0;
  if (name.substr(0, kPrefix.size()) != kPrefix) return -1;
  name.remove_prefix(kPrefix.size());
  int ordinal = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), ordinal);
  return error == std::errc{} && end == name.data() + name.size() ? ordinal : -1;
}

/// One DeviceImpl per device and process, for as long as anything uses it.
std::shared_ptr<DeviceImpl> shared_device(int ordinal) {
  static Mutex mutex;
  static std::map<int, std::weak_ptr<DeviceImpl>> devices WYVERN_GUARDED_BY(mutex);
  const Lock lock(mutex);
  std::weak_ptr<DeviceImpl>& slot = devices[ordinal];
  std::shared_ptr<DeviceImpl> device = slot.lock();
  if (!device) {
    device = ordinal < 0 ? open_cpu_device() : open_cuda_device(ordinal);
    slot = device;
  }
  return device;
}

}  // namespace

std::vector<DeviceInfo> list_devices() {
  std::vector<DeviceInfo> infos{cpu_device_info()};
  try {
    for (DeviceInfo& info : cuda_device_infos()) infos.push_back(std::move(info));
  } catch (const Error& error) {
    DeviceInfo broken;
    broken.name = "cuda";
    broken.cuda = true;
    broken.problem = error.what();
    infos.push_back(std::move(broken));
  }
  return infos;
}

Device Device::open(std::string_view name) {
  if (name == "cpu") return Device(shared_device(-1));
  const int ordinal = cuda_ordinal(name);
  if (ordinal < 0)
    throw Error(ErrorKind::kBadInput,
                fmt::format("device is '{}'; it must be cpu or cuda:N", name));
  return Device(shared_device(ordinal));
}

Device Device::best() {
  for (const DeviceInfo& info : list_devices())
    if (info.cuda && info.problem.empty()) return open(info.name);
  return open("cpu");
}

const DeviceInfo& Device::info() const { return impl_->info(); }

std::shared_ptr<void> Device::allocate(std::size_t bytes) const {
  return {impl_->allocate(bytes), [impl = impl_](void* p) { impl->free(p); }};
}
void Device::copy_in(void* device, const void* host, std::size_t bytes) const {
  impl_->copy_in(device, host, bytes);
}
void Device::copy_out(void* host, const void* device, std::size_t bytes) const {
  impl_->copy_out(host, device, bytes);
}
void Device::fill(void* device, unsigned char byte, std::size_t bytes, Stream stream) const {
  impl_->fill(device, byte, bytes, stream);
}
void Device::synchronize(Stream stream) const { impl_->synchronize(stream); }

}  // namespace wyvern
