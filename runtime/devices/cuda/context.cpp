#include "runtime/devices/cuda/context.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

namespace wyvern::cuda {
namespace {

/// Clusters and programmatic launches came with Hopper.
constexpr int kFirstMajor = 9;
/// So many blocks every GPU that has clusters allows.
constexpr int kPortableCluster = 8;

}  // namespace

const Driver& driver_or_throw() {
  std::string problem;
  const Driver* found = driver(&problem);
  if (found == nullptr) throw Error(ErrorKind::kUnavailable, problem);
  return *found;
}

int attribute(const Driver& d, DeviceHandle device, DeviceAttribute which) {
  int value = 0;
  check(d.cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

PrimaryContext::PrimaryContext(const Driver& d, int ordinal) : driver(d) {
  check(d.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  if (d.cuLaunchKernelEx != nullptr &&
      attribute(d, device, kComputeCapabilityMajor) >= kFirstMajor) {
    programmatic = true;
    if (attribute(d, device, kClusterLaunch) != 0) max_cluster = kPortableCluster;
  }
  check(d.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
}

std::string PrimaryContext::cluster_problem(const std::array<std::int64_t, 3>& cluster) const {
  if (cluster[0] * cluster[1] * cluster[2] <= max_cluster) return {};
  if (driver.cuLaunchKernelEx == nullptr)
    return "the NVIDIA driver has no cuLaunchKernelEx; update it to CUDA 12.0 or newer";
  return max_cluster == 1 ? "this GPU has none" : fmt::format("{} is the most", max_cluster);
}

}  // namespace wyvern::cuda
