// The CUDA architectures that code can be made for.
#pragma once

#include <string>

namespace wyvern::detail {

/// "sm_80, sm_86, ...": every name that cuda_target() takes.
std::string cuda_arch_names();

}  // namespace wyvern::detail
