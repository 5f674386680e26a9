// Peak rates of the host's processor, measured.
#pragma once

#include "runtime/devices/device_impl.hpp"

namespace wyvern {

/// Memory copy and fp32 FMA rates of so many threads at once, in about half a second.
Rates measure_cpu_rates(int threads);

}  // namespace wyvern
