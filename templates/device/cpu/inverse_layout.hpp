// What invert_unit_lower needs beside the matrix and its inverse.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::cpu {

/// Rows that are eliminated one by one; above that whole blocks are multiplied. Scratch of
/// invert_unit_lower has as many rows.
constexpr int kSolveBlock = 16;

}  // namespace wyvern::cpu
