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
    {"u", Access::in, "U_DTYPE", {"B", "T", "HV", "V"}, ""},
    {"G", Access::in, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
    {"Gk", Access::in, "fp32", {"B", "T", "HV", "K"}, "VECTOR_GATE"},
    {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM,!VECTOR_GATE"},
};
inline const std::vector<std::string> kConstants{
    "DTYPE",  "U_DTYPE",     "H",           "HV",        "K",         "V",
    "VARLEN", "SCALAR_GATE", "VECTOR_GATE", "QK_L2NORM", "NEG_EIGVAL"};

/// What a walk writes, whole or resumed, and the tables it needs for that.
inline const std::vector<Argument> kOutputs{
    {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
    {"chunk_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
    {"h", Access::out, "DTYPE", {"NT", "HV", "K", "V"}, ""},
    {"v_new", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
    {"final_state", Access::out, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"}, "FINAL_STATE"},
};

template <class T>
std::vector<T> joined(std::vector<T> first, const std::vector<T>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Chunks a segment, where a scan is split.
inline std::vector<Value> segment_lengths() { return cuda::integers({16, 8, 32, 64}); }

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
  return config.integer("num_stages") *
         (2 * cuda::tile_bytes(BT, constants.integer("K"), type) +
          cuda::tile_bytes(BT, config.integer("BV"), constants.dtype("U_DTYPE")) +
          gate_bytes(constants, BT));
}

/// Scratch of one block, as common/cpu/scan.hpp hands it out.
inline std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  const std::int64_t K = constants.integer("K");
  return fp32_bytes(scratch::tile(K, BV) + scratch::tile(BT, K) + scratch::tile(BT, BV) +
                    scratch::vector(BT) + scratch::vector(K));
}

/// A direction: what a block keeps on chip, in bytes, and what its CUDA templates may be tuned by.
struct Direction {
  std::int64_t (*shared_bytes)(const Values&, const Config&);
  std::int64_t (*cpu_scratch)(const Values&, const Config&);
  std::vector<Tunable> tunables;  ///< beside BT, BV, num_warps and precision
};
inline const Direction kForward{
    shared_bytes,
    cpu_scratch,
    {{"num_stages", cuda::integers({2, 3, 1, 4})}, {"min_blocks", cuda::integers({0, 2, 4})}}};

/// What a block walks through: a sequence, a segment, or a segment for what it does to any state,
/// of which a block has columns of M or of R.
enum class Walk { sequence, segment, effect };

/// Blocks' columns and walks beside each other: BV columns of the state, or of M and of R.
inline std::int64_t tiles(Walk walk, const Values& constants, const Config& config) {
  const std::int64_t BV = config.integer("BV");
  const std::int64_t values = cuda::ceil_div(constants.integer("V"), BV);
  return walk == Walk::effect ? values + cuda::ceil_div(constants.integer("K"), BV) : values;
}
inline std::int64_t walks(Walk walk, const Extents& e) {
  return walk == Walk::sequence ? e.N : e.NS;
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

/// Empty, or why so many blocks a multiprocessor are not to be had. The minimum caps registers at
/// 128, at the cost of a few spills, where the compiler takes more.
inline std::string min_blocks_problem(const Values& constants, const Config& config,
                                      std::int64_t bytes, const Limits& limits) {
  const std::int64_t blocks = config.contains("min_blocks") ? config.integer("min_blocks") : 0;
  if (blocks == 0) return {};
  const std::int64_t registers = accumulators(constants, config);
  if (registers < 80 || registers > 96)
    return fmt::format("min_blocks={} does not change the {} registers of the state and V'", blocks,
                       registers);
  return cuda::min_blocks_problem(config, bytes, limits);
}

/// CUDA, sm_80 and up: one block BV columns of a walk, for one value head.
inline Template portable(Template t, const Direction& direction, Walk walk) {
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})},
                {"BV", cuda::integers({64, 32, 128, 16})},
                {"num_warps", cuda::integers({4, 2, 8, 1})}};
  t.tunables = joined(t.tunables, direction.tunables);
  t.tunables.push_back({"precision", cuda::kPrecisionValues});
  t.source = t.name + "/portable.cu";
  const auto bytes = direction.shared_bytes;
  t.illegal = [bytes](const Values& constants, const Config& config, const Limits& limits) {
    const std::int64_t needed = bytes(constants, config);
    for (std::string reason :
         {strip_problem(constants, config), min_blocks_problem(constants, config, needed, limits)})
      if (!reason.empty()) return reason;
    return cuda::exceeds_shared(needed, limits);
  };
  t.redundant = cuda::repeats_precision;
  const bool has_minimum = t.tunable("min_blocks") != nullptr;
  t.fallback = [bytes, has_minimum](const Values& constants, const Limits& limits,
                                    std::int64_t BT) {
    const std::int64_t V = constants.integer("V");
    const std::int64_t BV = V > 32 ? 64 : V > 16 ? 32 : 16;
    Config config{{"BT", BT},
                  {"BV", BV},
                  {"num_warps", BV / 16},
                  {"num_stages", std::int64_t{2}},
                  {"precision", cuda::default_precision(constants)}};
    if (has_minimum) config.set("min_blocks", std::int64_t{0});
    if (bytes(constants, config) > limits.shared_bytes) config.set("num_stages", std::int64_t{1});
    return config;
  };
  t.geometry = [bytes, walk](const Values& constants, const Config& config, const Extents& e) {
    return cuda::launch(walks(walk, e) * constants.integer("HV") * tiles(walk, constants, config),
                        config, bytes(constants, config));
  };
  return t;
}

/// The same on the CPU: one call is a block.
inline Template cpu(Template t, const Direction& direction, Walk walk) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = t.name + "/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}, {"BV", {128, 64, 32}}};
  const auto bytes = direction.cpu_scratch;
  t.illegal = [bytes](const Values& constants, const Config& config, const Limits& limits) {
    const std::string problem =
        column_block_problem("BV", config.integer("BV"), constants.integer("V"));
    return problem.empty() ? scratch_problem(bytes(constants, config), limits) : problem;
  };
  // The scan has only heads and columns to spread over the cores: narrower blocks for few heads.
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    const std::int64_t widest = constants.integer("HV") < 16 ? 64 : 128;
    return Config{{"BT", BT}, {"BV", column_block(constants.integer("V"), widest)}};
  };
  t.geometry = [bytes, walk](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{
        .grid = {tiles(walk, constants, config), constants.integer("HV"), walks(walk, e)},
        .shared_bytes = bytes(constants, config)};
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

/// The templates of a stage over these walks, for every device.
inline std::vector<Template> templates(const Template& stage, const Direction& direction,
                                       Walk walk) {
  std::vector<Template> all{portable(stage, direction, walk), cpu(stage, direction, walk)};
  if (walk != Walk::sequence)
    for (Template& t : all) t = split(std::move(t));
  return all;
}

}  // namespace wyvern::scan
