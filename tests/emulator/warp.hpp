// The instructions that 32 lanes carry out together.
#pragma once

#include <array>
#include <string>

#include "tests/emulator/machine.hpp"

namespace wyvern::emulator {

/// Carries `operation` out for a warp; the lanes' results are written. Empty, or what is wrong.
std::string execute(Collective operation, const std::array<LaneOperands*, 32>& lanes);

}  // namespace wyvern::emulator
