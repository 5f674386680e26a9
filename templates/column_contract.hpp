// Tunables and geometry of the templates that work on rows of gates column by column
// (common/cuda/columns.cuh): cumulative sums and gates, forward and backward.
#pragma once

#include <functional>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::columns {

/// Columns that groups of blocks cover, and what vectors of them must divide.
struct Cover {
  std::int64_t columns = 1;
  std::int64_t unit = 1;
  std::int64_t heads = 0;  ///< not 0: a block takes all columns of one of so many heads
};
using CoverOf = std::function<Cover(const Values& constants)>;

/// All columns of a scalar or vector gate.
inline Cover all_columns(const Values& constants) {
  const std::int64_t columns = constants.integer("GATE_HEADS");
  return {columns, columns};
}
/// All columns of a vector gate, vectors inside one head.
inline Cover all_keys(const Values& constants) {
  const std::int64_t K = constants.integer("K");
  return {constants.integer("HV") * K, K};
}
/// The heads of a scalar gate.
inline Cover all_heads(const Values& constants) {
  const std::int64_t heads = constants.integer("HV");
  return {heads, heads};
}
/// A vector gate head by head.
inline Cover keys_of_a_head(const Values& constants) {
  const std::int64_t K = constants.integer("K");
  return {K, K, constants.integer("HV")};
}

/// ColumnShape of common/cuda/columns.cuh.
struct Shape {
  std::int64_t vector = 1, groups = 1, rows = 1;
};
inline Shape shape(std::int64_t threads, std::int64_t size, const Cover& cover) {
  Shape s;
  s.vector = cover.unit % 4 == 0 ? 4 : cover.unit % 2 == 0 ? 2 : 1;
  std::int64_t lanes = 1;
  while (lanes < cuda::ceil_div(cover.columns, s.vector) && lanes < 32) lanes *= 2;
  s.groups = cuda::ceil_div(cover.columns, lanes * s.vector);
  s.rows = size / std::min(threads / lanes, size);
  return s;
}

/// Chunk slots where `size` is BT, else blocks of so many tokens.
inline std::int64_t row_blocks(const std::string& size, const Config& config, const Extents& e) {
  return size == "BT" ? e.NT : cuda::ceil_div(e.B * e.T, config.integer(size));
}

/// CUDA, sm_80 and up: one block the rows that the tunable `size` counts, and a group of columns or
/// a head.
inline Template portable(Template t, const std::string& size, const CoverOf& cover) {
  t.variant = "portable";
  t.tunables = {{size, cuda::integers({64, 32, 16, 128})},
                {"num_warps", cuda::integers({4, 8, 2, 16})}};
  t.source = t.name + "/portable.cu";
  t.illegal = [size, cover](const Values& constants, const Config& config, const Limits&) {
    const Shape s = shape(config.integer("num_warps") * 32, config.integer(size), cover(constants));
    if (s.rows * s.vector <= 64) return std::string();
    return fmt::format("{}={} with num_warps={} gives a thread {} rows of {} columns", size,
                       config.integer(size), config.integer("num_warps"), s.rows, s.vector);
  };
  t.fallback = [size, cover](const Values& constants, const Limits&, std::int64_t BT) {
    const std::int64_t rows = size == "BT" ? BT : 64;
    std::int64_t warps = 4;  // more where a thread would hold too much for others to run beside it
    for (; warps < 16; warps *= 2)
      if (const Shape s = shape(warps * 32, rows, cover(constants)); s.rows * s.vector <= 32) break;
    return Config{{size, rows}, {"num_warps", warps}};
  };
  t.geometry = [size, cover](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t threads = config.integer("num_warps") * 32;
    const Cover covered = cover(constants);
    const Shape s = shape(threads, config.integer(size), covered);
    const std::int64_t blocks = covered.heads != 0 ? covered.heads : s.groups;
    const std::int64_t sums = size == "BT" ? threads * s.vector * 4 : 0;
    return Geometry{{row_blocks(size, config, e) * blocks, 1, 1}, threads, sums};
  };
  return t;
}

/// One call: the rows that `size` counts, of all heads of a scalar gate or of one head's keys.
inline Template cpu(Template t, const std::string& size) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = t.name + "/cpu.cpp";
  t.tunables = {{size, {64, 32, 16}}};
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [size](const Values&, const Limits&, std::int64_t BT) {
    return Config{{size, size == "BT" ? BT : 64}};
  };
  t.geometry = [size](const Values& constants, const Config& config, const Extents& e) {
    const bool by_head = constants.flag("VECTOR_GATE");
    return Geometry{
        .grid = {row_blocks(size, config, e), by_head ? constants.integer("HV") : 1, 1}};
  };
  return t;
}

}  // namespace wyvern::columns
