// A GPU's primary context, shared by everything on the device, and making it current.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "runtime/devices/cuda/cuda_driver.hpp"

namespace wyvern::cuda {

/// Throws Error(kUnavailable) where there is none.
const Driver& driver_or_throw();

/// Throws Error(kUnavailable) for an attribute that the driver does not know.
int attribute(const Driver& d, DeviceHandle device, DeviceAttribute which);

/// Makes a context current for a scope; costs one cheap query when it already is.
class Current {
 public:
  Current(const Driver& d, Context context) : driver_(d) {
    check(d.cuCtxGetCurrent(&previous_), "cuCtxGetCurrent");
    changed_ = previous_ != context;
    if (changed_) check(d.cuCtxSetCurrent(context), "cuCtxSetCurrent");
  }
  ~Current() {
    if (changed_) driver_.cuCtxSetCurrent(previous_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver& driver_;
  Context previous_ = nullptr;
  bool changed_ = false;
};

/// The primary context, retained while anything of the device is alive, and the limits of launches
/// in it. Immutable; thread-safe.
struct PrimaryContext {
  const Driver& driver;
  DeviceHandle device = 0;
  Context context = nullptr;
  int max_cluster = 1;        ///< blocks of a cluster; 1: there are no clusters
  bool programmatic = false;  ///< a kernel may start before the one before it has ended

  PrimaryContext(const Driver& d, int ordinal);
  ~PrimaryContext() { driver.cuDevicePrimaryCtxRelease(device); }
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

  /// Empty where a kernel can be launched in clusters of this shape, else why not: the end of a
  /// sentence.
  std::string cluster_problem(const std::array<std::int64_t, 3>& cluster) const;
};

}  // namespace wyvern::cuda
