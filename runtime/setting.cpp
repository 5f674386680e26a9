#include "runtime/setting.hpp"

#include <array>

#include <unistd.h>

#include "runtime/devices/device_impl.hpp"

namespace wyvern {

Setting setting_of(const Device& device, const Problem& problem) {
  Setting setting;
  setting.B = problem.B;
  setting.T = problem.T;
  setting.N = problem.N;
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) == 0) setting.host = host.data();
  const DeviceState state = device.impl().state();
  setting.unit = state.unit;
  setting.clock_mhz = state.clock_mhz;
  setting.memory_clock_mhz = state.memory_clock_mhz;
  setting.power_limit_w = state.power_limit_w;
  return setting;
}

}  // namespace wyvern
