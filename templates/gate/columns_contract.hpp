// Tunables and geometry of the templates that work on rows of gates column by column
// (device/cuda/columns.cuh): cumulative sums and gates, forward and backward.
#pragma once

#include <functional>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/device/cuda/columns_layout.hpp"
#include "templates/template.hpp"

namespace wyvern::columns {

/// The columns that groups of blocks cover; vectors of columns divide `unit`.
struct Cover {
  std::int64_t columns = 1;
  std::int64_t unit = 1;
  std::int64_t heads = 0;  ///< not 0: a block takes all columns of one of so many heads
};
using CoverOf = std::function<Cover(const Spec& s)>;

/// All columns of a scalar or vector gate.
inline Cover all_columns(const Spec& s) {
  const std::int64_t columns = s.GATE_HEADS;
  return {columns, columns};
}
/// All columns of a vector gate, vectors inside one head.
inline Cover all_keys(const Spec& s) {
  const std::int64_t K = s.K;
  return {s.HV * K, K};
}
/// The heads of a scalar gate.
inline Cover all_heads(const Spec& s) {
  const std::int64_t heads = s.HV;
  return {heads, heads};
}
/// A vector gate head by head.
inline Cover keys_of_a_head(const Spec& s) {
  const std::int64_t K = s.K;
  return {K, K, s.HV};
}

/// How a block divides its rows and columns among its threads.
inline cuda::ColumnSplit split(std::int64_t threads, std::int64_t size, const Cover& cover) {
  return {threads, size, cover.columns, cover.unit};
}

/// Whether blocks are chunks, not runs of tokens.
inline bool by_chunks(const TunableName& size) { return size.name == tunable::BT.name; }

/// Chunk slots where `size` is BT, else blocks of so many tokens.
inline std::int64_t row_blocks(const TunableName& size, const Spec& s, const Extents& e) {
  return by_chunks(size) ? e.NT : cuda::ceil_div(e.B * e.T, s.*size.member);
}

/// CUDA, sm_80 and up: one block the rows that the tunable `size` counts, and a group of columns or
/// a head.
inline Template portable(Template t, const TunableName& size, const CoverOf& cover) {
  t.variant = "portable";
  t.tunables = {{size, cuda::integers({64, 32, 16, 128})},
                {tunable::num_warps, cuda::integers({4, 8, 2, 16})}};
  t.source = "portable.cu";
  t.illegal = [size, cover](const Spec& s, const Limits&) {
    const std::int64_t rows = s.*size.member;
    const cuda::ColumnSplit held = split(s.num_warps * 32, rows, cover(s));
    if (held.rows * held.vector <= 64) return std::string();
    return fmt::format("{}={} with num_warps={} gives a thread {} rows of {} columns", size.name,
                       rows, s.num_warps, held.rows, held.vector);
  };
  t.fallback = [size, cover](Spec& s, const Limits&) {
    if (!by_chunks(size)) s.*size.member = 64;
    s.num_warps = 4;  // more where a thread's registers would lower occupancy
    for (; s.num_warps < 16; s.num_warps *= 2) {
      const cuda::ColumnSplit held = split(s.num_warps * 32, s.*size.member, cover(s));
      if (held.rows * held.vector <= 32) break;
    }
  };
  t.geometry = [size, cover](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t threads = s.num_warps * 32;
    const Cover covered = cover(s);
    const cuda::ColumnSplit held = split(threads, s.*size.member, covered);
    const std::int64_t blocks = covered.heads != 0 ? covered.heads : held.groups;
    const std::int64_t sums = by_chunks(size) ? cuda::ColumnSumsLayout(threads, held).bytes : 0;
    return Geometry{{row_blocks(size, s, e) * blocks, 1, 1}, threads, sums};
  };
  return t;
}

/// One call: the rows that `size` counts, of all heads of a scalar gate or of one head's keys.
inline Template cpu(Template t, const TunableName& size) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{size, by_chunks(size) ? kCpuChunkSizes : std::vector<Value>{64, 32, 16}}};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [size](Spec& s, const Limits&) {
    if (!by_chunks(size)) s.*size.member = 64;
  };
  t.geometry = [size](const Spec& s, const Extents& e, const Limits&) {
    const bool by_head = s.VECTOR_GATE;
    return Geometry{.grid = {row_blocks(size, s, e), by_head ? s.HV : 1, 1}};
  };
  return t;
}

}  // namespace wyvern::columns
