// What the generator puts before everything else in CUDA templates.
#pragma once

#include "device/types.hpp"

namespace wyvern {
struct TensorMap;
namespace cuda {}
}  // namespace wyvern
