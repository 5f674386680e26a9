// The least time a problem can take: its work over the device's peak rates.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>

#include <string>

#include "runtime/devices/device_impl.hpp"
#include "runtime/operators/operator.hpp"

namespace wyvern {

/// A device's peak rates, and their source.
struct Peak {
  double bytes_per_s = 0;  ///< of device memory or of the caches, counting reads and writes
  double flops_per_s = 0;  ///< matrix products of the problem's dtype and precision floor
  std::string basis;
};

/// On an H200 4.25 TB/s (device copy) and 780 TFLOP/s (dense bf16), both measured; on other GPUs
/// the driver's memory figures and the architecture's dense rate at boost clock; on a CPU memory
/// copy and FMA rates measured now on all threads (about half a second). Unless `cold` the tensors
/// lie where caches have room for them, as they do where a pass is timed again and again: then
/// bytes_per_s is the rate of the caches for data of that size, where the device's are known.
Peak device_peak(const Device& device, const Problem& problem, bool cold);

/// The same from rates that are known.
Peak peak_of(const Rates& rates, const Problem& problem, bool cold);

/// Seconds.
double floor_time(const Work& work, const Peak& peak);

}  // namespace wyvern
