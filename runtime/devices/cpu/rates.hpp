// Peak rates of the host's processor, measured.
#pragma once

#include "runtime/devices/device_impl.hpp"

namespace wyvern {

/// Memory copy and fp32 FMA rates of `threads` threads together; takes about half a second.
Rates measure_cpu_rates(int threads);

}  // namespace wyvern
