// What the templates of the forward state scan share: fwd_h, fwd_h_segment, fwd_h_resume; and what
// those of the reverse one share with them (reverse_scan_contract.hpp).
#pragma once

#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::scan {

/// The chunks a scan walks through; then come what sets the state, tables and outputs.
inline const std::vector<Argument> kInputs{
    {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, "!VECTOR_GATE"},
    {"kg", Access::in, "DTYPE", {"B", "T", "HV", "K"}, "VECTOR_GATE"},
    {"w", Access::in, "DTYPE", {"B", "T", "HV", "K"}, ""},
    {"u", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
    {"G", Access::in, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
    {"Gk", Access::in, "fp32", {"B", "T", "HV", "K"}, "VECTOR_GATE"},
    {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM,!VECTOR_GATE"},
};
inline const std::vector<std::string> kConstants{"DTYPE",       "H",           "HV",       "K", "V",
                                                 "VARLEN",      "SCALAR_GATE", "VECTOR_GATE",
                                                 "QK_L2NORM",   "NEG_EIGVAL"};

template <class T>
std::vector<T> joined(std::vector<T> first, const std::vector<T>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Chunks a segment, where a scan is split.
inline std::vector<Value> segment_lengths() { return cuda::integers({16, 8, 32, 64}); }

/// Tiles of BV columns of what a segment does to a state: of M and of R.
inline std::int64_t segment_tiles(const Values& constants, const Config& config) {
  const std::int64_t BV = config.integer("BV");
  return cuda::ceil_div(constants.integer("K"), BV) + cuda::ceil_div(constants.integer("V"), BV);
}

/// The gate and the scales of keys of one chunk.
inline std::int64_t gate_bytes(const Values& constants, std::int64_t BT) {
  if (constants.flag("VECTOR_GATE"))
    return cuda::column_bytes(cuda::round_up(constants.integer("K"), 16));
  return (static_cast<int>(constants.flag("SCALAR_GATE")) +
          static_cast<int>(constants.flag("QK_L2NORM"))) *
         cuda::column_bytes(BT);
}

inline std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const DType type = constants.dtype("DTYPE");
  const std::int64_t BT = config.integer("BT");
  return config.integer("num_stages") * (2 * cuda::tile_bytes(BT, constants.integer("K"), type) +
                                         cuda::tile_bytes(BT, config.integer("BV"), type) +
                                         gate_bytes(constants, BT));
}

/// Registers of a thread that hold the state and V'.
inline std::int64_t accumulators(const Values& constants, const Config& config) {
  const std::int64_t strips = config.integer("BV") / 16 / config.integer("num_warps");
  return strips * (cuda::round_up(constants.integer("K"), 16) + config.integer("BT")) / 2;
}

/// Empty, or why the warps of a block cannot share out its columns of the state.
inline std::string strip_problem(const Values& constants, const Config& config) {
  const std::int64_t BV = config.integer("BV");
  const std::int64_t warps = config.integer("num_warps");
  if (std::string reason = cuda::exceeds_dimension("BV", BV, "V", constants.integer("V"));
      !reason.empty())
    return reason;
  if (BV % (16 * warps) != 0)
    return fmt::format("BV={} is not a multiple of 16 columns for each of {} warps", BV, warps);
  if (BV / 16 / warps > 2 || accumulators(constants, config) > cuda::kMaxAccumulators)
    return fmt::format("num_warps={} keeps too much of the state in each thread", warps);
  return {};
}

inline std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  if (std::string reason = strip_problem(constants, config); !reason.empty()) return reason;
  const std::int64_t warps = config.integer("num_warps");
  // A minimum caps registers at 128, at the cost of a few spills, where the compiler takes more.
  const std::int64_t blocks = config.integer("min_blocks");
  if (blocks > 0 && blocks * warps != 16)
    return fmt::format("min_blocks={} of {} warps is not the 16 warps that 128 registers allow",
                       blocks, warps);
  if (blocks > 0 && (accumulators(constants, config) < 80 || accumulators(constants, config) > 96))
    return fmt::format("min_blocks={} does not change the {} registers of the state and V'", blocks,
                       accumulators(constants, config));
  if (blocks * shared_bytes(constants, config) > limits.shared_bytes)
    return fmt::format("min_blocks={} do not fit into shared memory", blocks);
  return cuda::exceeds_shared(shared_bytes(constants, config), limits);
}

/// Tunables, legality and defaults of a CUDA scan; geometry and source are the template's own.
inline Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})},
                {"BV", cuda::integers({64, 32, 128, 16})},
                {"num_warps", cuda::integers({4, 2, 8, 1})},
                {"num_stages", cuda::integers({2, 3, 1, 4})},
                {"min_blocks", cuda::integers({0, 2, 4})},
                {"precision", cuda::kPrecisionValues}};
  t.source = t.name + "/portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](const Values& constants, const Limits& limits, std::int64_t BT) {
    const std::int64_t V = constants.integer("V");
    const std::int64_t BV = V > 32 ? 64 : V > 16 ? 32 : 16;
    Config config{{"BT", BT},
                  {"BV", BV},
                  {"num_warps", BV / 16},
                  {"num_stages", std::int64_t{2}},
                  {"min_blocks", std::int64_t{0}},
                  {"precision", cuda::default_precision(constants)}};
    if (shared_bytes(constants, config) > limits.shared_bytes)
      config.set("num_stages", std::int64_t{1});
    return config;
  };
  return t;
}

/// The launch of `blocks` times the tiles of V.
inline Geometry cuda_geometry(const Values& constants, const Config& config, std::int64_t blocks) {
  return Geometry{
      {blocks, 1, 1}, config.integer("num_warps") * 32, shared_bytes(constants, config)};
}

/// Scratch of one block, as common/cpu/scan.hpp hands it out.
inline std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  const std::int64_t K = constants.integer("K");
  return fp32_bytes(scratch::tile(K, BV) + scratch::tile(BT, K) + scratch::tile(BT, BV) +
                    scratch::vector(BT) + scratch::vector(K));
}

/// The same on the CPU; geometry is the template's own.
inline Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = t.name + "/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}, {"BV", {128, 64, 32}}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    const std::string problem =
        column_block_problem("BV", config.integer("BV"), constants.integer("V"));
    return problem.empty() ? scratch_problem(cpu_scratch(constants, config), limits) : problem;
  };
  // The scan has only heads and columns to spread over the cores: narrower blocks for few heads.
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    const std::int64_t widest = constants.integer("HV") < 16 ? 64 : 128;
    return Config{{"BT", BT}, {"BV", column_block(constants.integer("V"), widest)}};
  };
  return t;
}

/// Adds the segment length to a scan's tunables.
inline Template split(Template t) {
  t.tunables.push_back({"SEG", segment_lengths()});
  const auto fallback = t.fallback;
  t.fallback = [fallback](const Values& constants, const Limits& limits, std::int64_t BT) {
    Config config = fallback(constants, limits, BT);
    config.set("SEG", segment_lengths().front());
    return config;
  };
  return t;
}

}  // namespace wyvern::scan
