// The instructions that 32 lanes carry out together.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>

#include "tests/emulator/machine.hpp"

namespace wyvern::emulator {

/// Carries `operation` out for a warp; the lanes' results are written. Empty, or what is wrong.
std::string execute(Collective operation, const std::array<LaneOperands*, 32>& lanes);

/// bf16_to_float(), which would be a call for each element of each product.
inline float bf16_number(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

}  // namespace wyvern::emulator
