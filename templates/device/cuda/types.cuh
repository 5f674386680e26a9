// What the generator puts before everything else in CUDA templates.
#pragma once

#include "device/types.hpp"

namespace wyvern {
using int64 = long long;
namespace cuda {}
}  // namespace wyvern
