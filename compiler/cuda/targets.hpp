// The CUDA architectures that code can be compiled for.
#pragma once

#include <string>
#include <string_view>

namespace wyvern::detail {

/// "sm_80, sm_86, ...": the names that cuda_target() accepts; if there are many, those nearest to
/// `wanted`.
std::string nearest_archs(std::string_view wanted);

}  // namespace wyvern::detail
