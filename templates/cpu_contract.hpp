// What the contracts of CPU templates share.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "templates/common/cpu/scratch.hpp"
#include "templates/template.hpp"

namespace wyvern {

/// Bytes of so many fp32 values.
constexpr std::int64_t fp32_bytes(std::int64_t count) { return count * 4; }

/// Empty when a block may take this much scratch memory, else the reason why not.
inline std::string scratch_problem(std::int64_t bytes, const Limits& limits) {
  if (bytes <= limits.shared_bytes) return {};
  return fmt::format("a block needs {} bytes of scratch, more than {}", bytes,
                     limits.shared_bytes);
}

/// Empty when half a block of columns would not do for all of them, else the reason: wider blocks
/// than needed only cost scratch. 32 is always legal.
inline std::string column_block_problem(std::string_view name, std::int64_t block,
                                        std::int64_t columns) {
  if (block <= 32 || block / 2 < columns) return {};
  return fmt::format("{}={} is wider than {} columns need", name, block, columns);
}

/// The narrowest legal block for so many columns, or `widest` if that is not enough.
constexpr std::int64_t column_block(std::int64_t columns, std::int64_t widest) {
  std::int64_t block = 32;
  while (block < columns && block < widest) block *= 2;
  return block;
}

}  // namespace wyvern
