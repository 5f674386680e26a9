// The scratch of invert_unit_lower.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::cpu {

/// Rows that are eliminated one by one; above that whole blocks are multiplied. Scratch of
/// invert_unit_lower has as many rows.
constexpr int kSolveBlock = 16;

}  // namespace wyvern::cpu
