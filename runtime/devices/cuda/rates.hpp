// Peak rates of a GPU.
#pragma once

#include "runtime/devices/device_impl.hpp"

namespace wyvern::cuda {

/// From the driver's memory figures and the architecture's dense rate at boost clock; measured
/// figures for an H200.
Rates rates(const DeviceInfo& info);

}  // namespace wyvern::cuda
