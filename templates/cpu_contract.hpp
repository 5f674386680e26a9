// What the contracts of CPU templates share.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "templates/device/cpu/scratch.hpp"
#include "templates/template.hpp"

namespace wyvern {

/// Bytes of so many fp32 values.
constexpr std::int64_t fp32_bytes(std::int64_t count) { return count * 4; }

/// Empty when a block may take this much scratch memory, else the reason why not.
inline std::string scratch_problem(std::int64_t bytes, const Limits& limits) {
  if (bytes <= limits.shared_bytes) return {};
  return fmt::format("a block needs {} bytes of scratch, more than {}", bytes, limits.shared_bytes);
}

/// The narrowest of the blocks 64, 128, ... that takes all of so many columns, or `widest`.
constexpr std::int64_t column_block(std::int64_t columns, std::int64_t widest) {
  std::int64_t block = std::min<std::int64_t>(64, widest);
  while (block < columns && block < widest) block *= 2;
  return block;
}

/// Empty for a block no wider than the columns need, else the reason: wider ones only cost scratch.
inline std::string column_block_problem(std::string_view name, std::int64_t block,
                                        std::int64_t columns) {
  if (block <= column_block(columns, block)) return {};
  return fmt::format("{}={} is wider than {} columns need", name, block, columns);
}

/// Tunables, legality, defaults and launch where one call is a chunk and value head, BK columns of
/// K at a time; `scratch_floats` counts what the template's cpu.cpp hands out.
inline Template cpu_chunks(Template t, std::int64_t (*scratch_floats)(const Spec&)) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BT, {64, 32, 16}}, {tunable::BK, {128, 64}}};
  t.illegal = [scratch_floats](const Spec& s, const Limits& limits) {
    const std::string problem = column_block_problem("BK", s.BK, s.K);
    if (!problem.empty()) return problem;
    return scratch_problem(fp32_bytes(scratch_floats(s)), limits);
  };
  t.fallback = [](Spec& s, const Limits&) { s.BK = column_block(s.K, 128); };
  t.geometry = [scratch_floats](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {s.HV, e.NT, 1}, .shared_bytes = fp32_bytes(scratch_floats(s))};
  };
  return t;
}

}  // namespace wyvern
