#include "templates/scan_contract.hpp"

namespace wyvern::bwd_dhu {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu";
  t.stages = {"bwd_dhu"};
  t.summary = "The reverse state scan: the gradient of every chunk's leaving state, and dU.";
  t.arguments = {
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
      {"dht", Access::in, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"}, "FINAL_STATE"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"dh", Access::out, "DTYPE", {"NT", "HV", "K", "V"}, ""},
      {"du", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"dinitial_state", Access::out, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"},
       "INITIAL_STATE"},
  };
  t.constants =
      scan::joined(scan::kConstants, {"INITIAL_STATE", "FINAL_STATE", "STATE_V_FIRST"});
  return t;
}

/// The gate and the scales of queries and keys of one chunk.
std::int64_t gate_bytes(const Values& constants, std::int64_t BT) {
  if (constants.flag("VECTOR_GATE"))
    return cuda::column_bytes(cuda::round_up(constants.integer("K"), 16));
  return ((constants.flag("SCALAR_GATE") ? 1 : 0) + (constants.flag("QK_L2NORM") ? 2 : 0)) *
         cuda::column_bytes(BT);
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const DType type = constants.dtype("DTYPE");
  const std::int64_t BT = config.integer("BT");
  return config.integer("num_stages") * (3 * cuda::tile_bytes(BT, constants.integer("K"), type) +
                                         2 * cuda::tile_bytes(BT, config.integer("BV"), type) +
                                         gate_bytes(constants, BT));
}

/// CUDA, sm_80 and up: one block BV value columns of a sequence and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})},
                {"BV", cuda::integers({64, 32, 128, 16})},
                {"num_warps", cuda::integers({4, 2, 8, 1})},
                {"num_stages", cuda::integers({2, 1, 3})},
                {"precision", cuda::kPrecisionValues}};
  t.source = "bwd_dhu/portable.cu";
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
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = cuda::ceil_div(constants.integer("V"), config.integer("BV"));
    return Geometry{{e.N * constants.integer("HV") * tiles, 1, 1},
                    config.integer("num_warps") * 32,
                    shared_bytes(constants, config)};
  };
  return t;
}

/// Scratch of one block, as bwd_dhu/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  const std::int64_t K = constants.integer("K");
  return fp32_bytes(scratch::tile(K, BV) + scratch::tile(2 * BT, K) +
                    scratch::tile(2 * BT, BV) + 2 * scratch::vector(BT) + scratch::vector(K));
}

/// One call: all chunks of one sequence, one value head, BV columns of the state.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "bwd_dhu/cpu.cpp";
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
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t BV = config.integer("BV");
    return Geometry{.grid = {(constants.integer("V") + BV - 1) / BV, constants.integer("HV"), e.N},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::bwd_dhu
