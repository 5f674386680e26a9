// What the generator puts before everything else in CUDA templates.
#pragma once

#include "device/types.hpp"

namespace wyvern {
using int64 = long long;
struct TensorMap;
namespace cuda {}
}  // namespace wyvern
