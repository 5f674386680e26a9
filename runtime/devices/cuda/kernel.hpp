// Code on a GPU.
#pragma once

#include <memory>

#include "runtime/devices/cuda/context.hpp"
#include "runtime/devices/device_impl.hpp"

namespace wyvern::cuda {

/// See DeviceImpl::load(). A launch makes two calls of the driver where the context is current, and
/// two more where it is not.
std::shared_ptr<const Kernel> load_kernel(std::shared_ptr<PrimaryContext> context,
                                          const Artifact& artifact, const Geometry& block);

}  // namespace wyvern::cuda
