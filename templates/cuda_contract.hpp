// Shared by the contracts of CUDA templates: which configs are legal, and launches.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <string>

#include "templates/template.hpp"

namespace wyvern::cuda {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

inline bool is_half(const Spec& s) { return s.DTYPE != DType::fp32; }

/// For templates whose products of 16-bit inputs are all 16-bit: `precision` has no effect there,
/// so only configs with the most accurate one, which every floor admits, are not redundant.
inline bool repeats_precision(const Spec& s) {
  return is_half(s) && s.precision != Precision::ieee;
}
inline Precision default_precision(const Spec& s) {
  return is_half(s) ? Precision::ieee : Precision::tf32x3;
}

inline const std::vector<Value>& kPrecisionValues =
    *new std::vector<Value>{Precision::tf32x3, Precision::tf32, Precision::ieee};

inline std::vector<Value> integers(std::initializer_list<std::int64_t> values) {
  return {values.begin(), values.end()};
}

/// Empty, or why `bytes` of shared memory are too many.
inline std::string exceeds_shared(std::int64_t bytes, const Limits& limits) {
  if (bytes <= limits.shared_bytes) return {};
  return fmt::format("needs {} bytes of shared memory a block, the target has {}", bytes,
                     limits.shared_bytes);
}

/// Empty, or why a tile of `width` columns is too wide: wider than the first of 32, 64, ... that
/// covers the dimension.
inline std::string exceeds_dimension(const char* tunable, std::int64_t width, const char* name,
                                     std::int64_t dimension) {
  if (width <= 32 || width / 2 < dimension) return {};
  return fmt::format("{}={} is too wide for {}={}", tunable, width, name, dimension);
}

/// Empty, or why min_blocks, which caps a thread's registers at 128, has no effect with this many
/// warps or cannot be met.
inline std::string min_blocks_problem(const Spec& s, std::int64_t bytes, const Limits& limits) {
  const std::int64_t blocks = s.min_blocks;
  if (blocks > 0 && blocks * s.num_warps != 16)
    return fmt::format("min_blocks={} of {} warps is not the 16 warps that 128 registers allow",
                       blocks, s.num_warps);
  if (blocks * bytes > limits.shared_bytes)
    return fmt::format("min_blocks={} do not fit into shared memory", blocks);
  return {};
}

/// A launch of `blocks` blocks of the config's warps.
inline Geometry launch(std::int64_t blocks, const Spec& s, std::int64_t shared_bytes) {
  return Geometry{{blocks, 1, 1}, s.num_warps * 32, shared_bytes};
}

/// A launch of `rows` rows of `blocks` blocks, so that kernels find block_row() and block_index()
/// without a division. A grid's last two dimensions are at most 65535 each, so there may be a few
/// rows more.
inline Geometry launch_rows(std::int64_t rows, std::int64_t blocks, const Spec& s,
                            std::int64_t shared_bytes) {
  const std::int64_t layers = ceil_div(rows, 65535);
  Geometry geometry = launch(blocks, s, shared_bytes);
  geometry.grid[1] = layers == 0 ? 0 : ceil_div(rows, layers);
  geometry.grid[2] = layers;
  return geometry;
}

/// The geometry of one block for each chunk and value head.
inline std::function<Geometry(const Spec&, const Extents&, const Limits&)> chunk_blocks(
    std::int64_t (*shared_bytes)(const Spec&)) {
  return [shared_bytes](const Spec& s, const Extents& e, const Limits&) {
    return launch(e.NT * s.HV, s, shared_bytes(s));
  };
}

/// Accumulator registers a thread may hold beside addresses and operands.
inline constexpr std::int64_t kMaxAccumulators = 176;

}  // namespace wyvern::cuda
