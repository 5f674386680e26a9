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
/// What a walk writes, whole or resumed, and the tables it needs for that.
inline const std::vector<Argument> kOutputs{
    {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
    {"chunk_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
    {"dh", Access::out, "DTYPE", {"NT", "HV", "K", "V"}, ""},
    {"du", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
    {"dinitial_state",
     Access::out,
     "fp32",
     {"N", "HV", "STATE_ROWS", "STATE_COLS"},
     "INITIAL_STATE"},
};
inline const std::vector<std::string> kConstants{
    "DTYPE", "H", "HV", "K", "V", "VARLEN", "SCALAR_GATE", "VECTOR_GATE", "QK_L2NORM"};

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
  return config.integer("num_stages") *
         (3 * cuda::tile_bytes(BT, constants.integer("K"), type) +
          2 * cuda::tile_bytes(BT, config.integer("BV"), type) + gate_bytes(constants, BT));
}

/// Scratch of one block, as common/cpu/reverse_scan.hpp hands it out.
inline std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  const std::int64_t K = constants.integer("K");
  return fp32_bytes(scratch::tile(K, BV) + scratch::tile(2 * BT, K) + scratch::tile(2 * BT, BV) +
                    2 * scratch::vector(BT) + scratch::vector(K));
}

inline const scan::Direction kReverse{
    shared_bytes, cpu_scratch, {{"num_stages", cuda::integers({2, 1, 3})}}};

}  // namespace wyvern::reverse_scan
