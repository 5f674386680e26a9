// What a GPU can do at most.
#pragma once

#include "runtime/devices/device_impl.hpp"

namespace wyvern::cuda {

/// From what the driver tells of memory and the architecture's dense rate at boost clock; of an
/// H200 what was measured.
Rates rates(const DeviceInfo& info);

}  // namespace wyvern::cuda
