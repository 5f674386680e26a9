// Shared by the contracts of templates that go token by token: on CUDA, over
// device/cuda/decode.cuh, how lanes divide a state, which divisions are legal, and the launch; and
// the CPU's.
#pragma once

#include <algorithm>

#include "templates/cost.hpp"
#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::decode {

constexpr std::int64_t power_of_two(std::int64_t n) {
  std::int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

/// Elements of the largest access, of up to 16 bytes and 8 elements, that divides `count` elements.
/// With longer accesses some lanes would have no keys when K is small.
inline std::int64_t vector_elements(std::int64_t count, DType type) {
  const auto size = static_cast<std::int64_t>(size_of(type));
  std::int64_t bytes = std::min<std::int64_t>(16, 8 * size);
  while (count * size % bytes != 0) bytes /= 2;
  return bytes / size;
}

/// How many keys and value columns of the state a lane holds, as in device/cuda/decode.cuh; 0 if a
/// warp's lanes cannot divide this many columns.
struct LaneTile {
  std::int64_t keys = 0, values = 0;
};
inline LaneTile lane_tile(const Spec& s, std::int64_t columns) {
  const std::int64_t K = s.K, V = s.V;
  const bool v_first = s.STATE_V_FIRST;
  const std::int64_t vector = vector_elements(v_first ? K : V, s.STATE_DTYPE);
  if (v_first) {
    const std::int64_t key_lanes = std::min<std::int64_t>(power_of_two(K / vector), 16);
    return {cuda::ceil_div(K / vector, key_lanes) * vector, columns * key_lanes / 32};
  }
  if (columns < vector || columns > 32 * vector) return {};
  const std::int64_t key_lanes = 32 * vector / columns;
  const std::int64_t keys = cuda::ceil_div(K, key_lanes);
  const std::int64_t run = std::min(vector_elements(K, s.DTYPE), power_of_two(keys));
  return {cuda::round_up(keys, run), vector};
}

/// Empty, or why a block's columns do not suit its warps; beside the state a lane holds k, q, the
/// decay and the erase gate of its keys.
inline std::string illegal(const Spec& s) {
  const std::int64_t BV = s.BV, warps = s.num_warps;
  if (BV >= 2 * s.V && BV > 8) return fmt::format("BV={} is too wide for V={}", BV, s.V);
  const LaneTile lane = lane_tile(s, BV / warps);
  if (BV % warps != 0 || lane.keys == 0 || lane.values == 0)
    return fmt::format("BV={} does not divide among {} warps", BV, warps);
  if (lane.keys * (lane.values + (s.ERASE_WRITE ? 4 : 3)) > 136)
    return fmt::format("BV={} and num_warps={} keep too much of the state in each thread", BV,
                       warps);
  return {};
}

/// Blocks of a sequence and value head: with OUTPUT_NORM one block has all columns, BV at a time.
inline std::int64_t blocks_a_head(const Spec& s) {
  return s.OUTPUT_NORM ? 1 : cuda::ceil_div(s.V, s.BV);
}

/// Value columns of a block and of a warp. A warp moves 64 bytes of each row if its registers hold
/// that much of the state, else 32, memory's smallest access (one H200, 2026-11-21, 128 sequences,
/// fp32 states of 128 x 128: 0.137 ms and 0.155). With STATE_V_FIRST a block is one warp, with
/// whole rows of K (one H200, 2026-11-26, 64 and 256 sequences: 16 rows a warp 74 and 280 us, 8
/// rows 75 and 290).
struct Columns {
  std::int64_t block, warp;
};
inline Columns usual_columns(Spec s) {
  const auto size = static_cast<std::int64_t>(size_of(s.STATE_DTYPE));
  s.BV = 32;
  s.num_warps = 2;
  if (size == 4 && !s.STATE_V_FIRST && s.V > 32 && illegal(s).empty()) return {32, 16};
  s.BV = 16;
  s.num_warps = 1;
  if (size == 4 && s.STATE_V_FIRST && !s.VECTOR_GATE && s.V >= 16 && illegal(s).empty())
    return {16, 16};
  const std::int64_t columns = std::min<std::int64_t>(32 / size, 16);
  return {columns * (s.V > columns * 2 ? 4 : 1), columns};
}

/// The device's memory bandwidth; an H200's where it is unknown.
inline double bytes_per_us(const Limits& limits) {
  constexpr double kH200 = 4.8e6;
  return limits.bytes_per_us > 0 ? limits.bytes_per_us : kH200;
}

/// Microseconds to load and store the states of all sequences at this part of peak bandwidth.
inline double moved_states(double part, const Spec& s, const Workload& w, const Limits& limits) {
  const int times = (s.INPLACE_STATE || s.INITIAL_STATE ? 1 : 0) +
                    (s.FINAL_STATE || (s.INPLACE_STATE && !s.KEEP_POOL) ? 1 : 0);
  const auto states = static_cast<double>(w.extents.N * s.HV * times);
  return states * static_cast<double>(s.K * s.V) * static_cast<double>(size_of(s.STATE_DTYPE)) /
         (part * bytes_per_us(limits));
}

/// Microseconds to convert the states of all sequences where they have fewer than 32 bits. One
/// H200, 2026-11-28, rows of keys, 32 heads, bf16: 8, 64 and 256 sequences take 13.1, 49.7 and 172
/// us; fp32, twice the bytes: 14.7, 72.2 and 270.
inline double converted_states(const Spec& s, const Workload& w, const Limits& limits) {
  if (size_of(s.STATE_DTYPE) >= 4) return 0;
  constexpr double kFilled = 1.4, kState = 1.65e-4;  // an element of a state, a multiprocessor
  const int multiprocessors = limits.multiprocessors > 0 ? limits.multiprocessors : 132;
  return kFilled + kState * static_cast<double>(w.extents.N * s.HV * s.K * s.V) / multiprocessors;
}

/// Microseconds that the norm of o adds: its gate's bytes at this part of peak bandwidth.
inline double moved_gates(double part, const Spec& s, const Workload& w, const Limits& limits) {
  if (!s.OUTPUT_NORM) return 0;
  const auto elements = static_cast<double>(w.extents.B * w.extents.T * s.HV * s.V);
  return elements * static_cast<double>(size_of(s.DTYPE)) / (part * bytes_per_us(limits));
}

/// CUDA, sm_80 and up: one block BV value columns of a sequence and value head; with OUTPUT_NORM
/// all of them.
inline Template portable(Template t, std::int64_t (*shared_bytes)(const Spec&)) {
  t.variant = "portable";
  t.tunables = {{tunable::BV, cuda::integers({32, 64, 16, 8, 128})},
                {tunable::num_warps, cuda::integers({4, 2, 1, 8})}};
  t.source = "portable.cu";
  t.illegal = [](const Spec& s, const Limits&) { return illegal(s); };
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    const Columns best = usual_columns(s);
    constexpr double kFilled = 2.2;
    // With OUTPUT_NORM only the number of turns matters; of several turns each runs twice.
    const bool usual = s.OUTPUT_NORM || (s.BV == best.block && s.BV == best.warp * s.num_warps);
    // One H200, 2026-11-26: 64 sequences of 32 heads take 73 us; with slots in random order 81 us
    // if warps move pieces of rows, 74 us if they move whole rows; in blocks of all columns 91 us.
    // On 2026-11-25: of four tokens each 119 us, one of 64 tokens 76 us; with a gate a key channel
    // 93, 204 and 132 us.
    const auto later = static_cast<double>(std::max<std::int64_t>(w.longest * s.STEPS - 1, 0));
    const double states = 3.8e-7 * static_cast<double>(s.K * s.V * w.extents.N * s.HV);
    // Each turn over BV of a block's columns waits for its first load; not measured.
    const std::int64_t count = cuda::ceil_div(s.V, s.BV) / blocks_a_head(s);
    const auto turns = static_cast<double>(count);
    const double passes = turns > 1 ? 2 : 1;
    const double steps = s.VECTOR_GATE ? 0.9 * states + later * std::max(3 * states, 2.0 * turns)
                                       : later * std::max(states, 1.1 * turns);
    const double part = s.OUTPUT_NORM     ? 0.65
                        : s.STATE_V_FIRST ? 0.815
                        : s.STATE_INDEX   ? 0.75
                                          : 0.835;
    const double norm = s.OUTPUT_NORM ? kFilled / 2 + moved_gates(part, s, w, limits) : 0;
    return cost::kLaunch +
           passes * (turns * kFilled +
                     std::max(moved_states(part, s, w, limits), converted_states(s, w, limits)) +
                     steps) +
           norm + (usual ? 0.0 : 1.0);
  };
  t.geometry = [shared_bytes](const Spec& s, const Extents& e, const Limits&) {
    return cuda::launch_rows(e.N, s.HV * blocks_a_head(s), s, shared_bytes(s));
  };
  return t;
}

/// One call: all tokens of one sequence, one value head, BV columns of the state; with OUTPUT_NORM
/// all columns, whatever BV is. `bytes` counts its scratch.
inline Template cpu(Template t, std::int64_t (*bytes)(const Spec&)) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BV, {128, 64}}};
  t.illegal = [bytes](const Spec& s, const Limits& limits) {
    const std::string problem = column_block_problem("BV", s.BV, s.V);
    return problem.empty() ? scratch_problem(bytes(s), limits) : problem;
  };
  t.redundant = [](const Spec& s) { return s.OUTPUT_NORM && s.BV != column_block(s.V, 128); };
  t.fallback = [](Spec& s, const Limits&) { s.BV = column_block(s.V, 128); };
  t.geometry = [bytes](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {blocks_a_head(s), s.HV, e.N}, .shared_bytes = bytes(s)};
  };
  return t;
}

}  // namespace wyvern::decode
