// What NVIDIA's management library tells of a GPU: its clocks now and its power limit. The library
// is opened at run time; without it nothing is known.
#pragma once

#include <string>

#include "runtime/devices/device_impl.hpp"

namespace wyvern::cuda {

/// The state of the GPU of this UUID ("GPU-..."), figures that cannot be had left at 0. The first
/// call takes tens of milliseconds. Thread-safe.
DeviceState gpu_state(const std::string& uuid);

/// The installed driver's own version, "580.159.03"; empty where the kernel does not tell.
std::string driver_version();

}  // namespace wyvern::cuda
