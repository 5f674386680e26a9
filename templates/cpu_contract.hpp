// Shared by the contracts of CPU templates.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "templates/device/cpu/layout.hpp"
#include "templates/template.hpp"

namespace wyvern {

/// Chunk sizes of CPU templates, in the order in which the tuner tries them.
inline const std::vector<Value>& kCpuChunkSizes = *new std::vector<Value>{64, 32, 16, 128};

/// Bytes of a block's scratch.
using ScratchBytes = std::int64_t (*)(const Spec&);

/// The bytes of the layout by which the template's cpu.cpp places its tiles.
template <template <class> class Layout>
std::int64_t scratch_bytes(const Spec& s) {
  return Layout<Spec>(s).bytes;
}

/// Empty when a block may have this much scratch, else the reason.
inline std::string scratch_problem(std::int64_t bytes, const Limits& limits) {
  if (bytes <= limits.shared_bytes) return {};
  return fmt::format("a block needs {} bytes of scratch, more than {}", bytes, limits.shared_bytes);
}

/// The narrowest of the blocks 64, 128, ... that covers all columns, at most `widest`.
constexpr std::int64_t column_block(std::int64_t columns, std::int64_t widest) {
  std::int64_t block = std::min<std::int64_t>(64, widest);
  while (block < columns && block < widest) block *= 2;
  return block;
}

/// Empty for a block no wider than the columns need, else the reason: wider ones waste scratch.
inline std::string column_block_problem(std::string_view name, std::int64_t block,
                                        std::int64_t columns) {
  if (block <= column_block(columns, block)) return {};
  return fmt::format("{}={} is wider than {} columns need", name, block, columns);
}

/// Tunables, legality and launch where one call is a chunk and one of its heads: a value head, or a
/// key head (constant::H) with all its value heads.
inline Template cpu_chunks(Template t, ScratchBytes bytes,
                           const Constant<std::int64_t>& heads = constant::HV) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BT, kCpuChunkSizes}};
  t.illegal = [bytes](const Spec& s, const Limits& limits) {
    return scratch_problem(bytes(s), limits);
  };
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [bytes, heads = heads.member](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {s.*heads, e.NT, 1}, .shared_bytes = bytes(s)};
  };
  return t;
}

/// The columns that the column tiles of a call divide.
inline std::int64_t key_columns(const Spec& s) { return s.K; }
inline std::int64_t value_columns(const Spec& s) { return s.V; }
inline std::int64_t all_columns(const Spec& s) { return std::max(s.K, s.V); }

/// The same where a call computes `block` (BK or BV) columns at a time.
inline Template cpu_chunks_by_columns(Template t, ScratchBytes bytes, const TunableName& block,
                                      std::int64_t (*columns)(const Spec&),
                                      const Constant<std::int64_t>& heads = constant::HV) {
  t = cpu_chunks(std::move(t), bytes, heads);
  t.tunables.push_back({block, {128, 64}});
  t.illegal = [bytes, columns, block](const Spec& s, const Limits& limits) {
    const std::string problem = column_block_problem(block.name, s.*block.member, columns(s));
    return problem.empty() ? scratch_problem(bytes(s), limits) : problem;
  };
  t.fallback = [columns, block](Spec& s, const Limits&) {
    s.*block.member = column_block(columns(s), 128);
  };
  return t;
}

}  // namespace wyvern
