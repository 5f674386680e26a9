// What the templates of the reverse state scan share: bwd_dhu, bwd_dhu_segment, bwd_dhu_resume.
#pragma once

#include "templates/scan_contract.hpp"

namespace wyvern::reverse_scan {

/// The chunks a scan walks through; then come what sets the state's gradient, tables and outputs.
inline const std::vector<Argument> kInputs{
    {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, "!VECTOR_GATE"},
    {"qg", Access::in, "DTYPE", {"B", "T", "HV", "K"}, "VECTOR_GATE"},
    {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, "!VECTOR_GATE"},
    {"kg", Access::in, "DTYPE", {"B", "T", "HV", "K"}, "VECTOR_GATE"},
    {"w", Access::in, "DTYPE", {"B", "T", "HV", "K"}, ""},
    {"do", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
    {"dv_local", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
    {"G", Access::in, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
    {"Gk", Access::in, "fp32", {"B", "T", "HV", "K"}, "VECTOR_GATE"},
    {"q_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM,!VECTOR_GATE"},
    {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM,!VECTOR_GATE"},
};
inline const std::vector<std::string> kConstants{"DTYPE",       "H",           "HV",       "K", "V",
                                                 "VARLEN",      "SCALAR_GATE", "VECTOR_GATE",
                                                 "QK_L2NORM"};

/// The gate and the scales of queries and keys of one chunk.
inline std::int64_t gate_bytes(const Values& constants, std::int64_t BT) {
  if (constants.flag("VECTOR_GATE"))
    return cuda::column_bytes(cuda::round_up(constants.integer("K"), 16));
  return ((constants.flag("SCALAR_GATE") ? 1 : 0) + (constants.flag("QK_L2NORM") ? 2 : 0)) *
         cuda::column_bytes(BT);
}

inline std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const DType type = constants.dtype("DTYPE");
  const std::int64_t BT = config.integer("BT");
  return config.integer("num_stages") * (3 * cuda::tile_bytes(BT, constants.integer("K"), type) +
                                         2 * cuda::tile_bytes(BT, config.integer("BV"), type) +
                                         gate_bytes(constants, BT));
}

/// Tunables, legality and defaults of a CUDA scan; geometry and source are the template's own.
inline Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})},
                {"BV", cuda::integers({64, 32, 128, 16})},
                {"num_warps", cuda::integers({4, 2, 8, 1})},
                {"num_stages", cuda::integers({2, 1, 3})},
                {"precision", cuda::kPrecisionValues}};
  t.source = t.name + "/portable.cu";
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    const std::string problem = scan::strip_problem(constants, config);
    return problem.empty() ? cuda::exceeds_shared(shared_bytes(constants, config), limits)
                           : problem;
  };
  t.redundant = cuda::repeats_precision;
  t.fallback = [](const Values& constants, const Limits& limits, std::int64_t BT) {
    const std::int64_t V = constants.integer("V");
    const std::int64_t BV = V > 32 ? 64 : V > 16 ? 32 : 16;
    Config config{{"BT", BT},
                  {"BV", BV},
                  {"num_warps", BV / 16},
                  {"num_stages", std::int64_t{2}},
                  {"precision", cuda::default_precision(constants)}};
    if (shared_bytes(constants, config) > limits.shared_bytes)
      config.set("num_stages", std::int64_t{1});
    return config;
  };
  return t;
}

/// A launch of that many blocks.
inline Geometry cuda_geometry(const Values& constants, const Config& config, std::int64_t blocks) {
  return Geometry{
      {blocks, 1, 1}, config.integer("num_warps") * 32, shared_bytes(constants, config)};
}

/// Scratch of one block, as common/cpu/reverse_scan.hpp hands it out.
inline std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  const std::int64_t K = constants.integer("K");
  return fp32_bytes(scratch::tile(K, BV) + scratch::tile(2 * BT, K) +
                    scratch::tile(2 * BT, BV) + 2 * scratch::vector(BT) + scratch::vector(K));
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

}  // namespace wyvern::reverse_scan
