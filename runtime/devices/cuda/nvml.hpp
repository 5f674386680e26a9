// A GPU's current clocks and power limit, from NVIDIA's management library (NVML). The library is
// opened at run time; without it both are unknown.
#pragma once

#include <string>

#include "runtime/devices/device_impl.hpp"

namespace wyvern::cuda {

/// The state of the GPU of this UUID ("GPU-..."), figures that are not available are 0. The first
/// call takes tens of milliseconds. Thread-safe.
DeviceState gpu_state(const std::string& uuid);

/// The installed driver's own version, "580.159.03"; empty if the kernel does not report it.
std::string driver_version();

}  // namespace wyvern::cuda
