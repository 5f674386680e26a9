// What the templates share that carry states, or gradients of them, from segment to segment:
// fwd_h_combine, bwd_dhu_combine.
#pragma once

#include "templates/scan_contract.hpp"

namespace wyvern::combine {

inline std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const std::int64_t K = constants.integer("K");
  return 2 * cuda::tile_bytes(config.integer("BV"), K, DType::fp32) +
         2 * cuda::tile_bytes(config.integer("BK"), K, DType::fp32);
}

/// CUDA, sm_80 and up: one block BV value columns of a sequence and value head; each warp sixteen
/// of the BK rows of M that are on chip at a time.
inline Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})}, {"BV", cuda::integers({16, 32})},
                {"BK", cuda::integers({64, 32, 128})},     {"num_warps", cuda::integers({4, 2, 8})},
                {"precision", cuda::kPrecisionValues},     {"SEG", scan::segment_lengths()}};
  t.source = t.name + "/portable.cu";
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    if (config.integer("BK") != 16 * config.integer("num_warps"))
      return fmt::format("BK={} is not 16 rows for each of {} warps", config.integer("BK"),
                         config.integer("num_warps"));
    return cuda::exceeds_shared(shared_bytes(constants, config), limits);
  };
  t.redundant = [](const Values&, const Config&) { return false; };
  t.fallback = [](const Values& constants, const Limits& limits, std::int64_t BT) {
    Config config{{"BT", BT},
                  {"BV", std::int64_t{16}},
                  {"BK", std::int64_t{64}},
                  {"num_warps", std::int64_t{4}},
                  {"precision", cuda::is_half(constants) ? Precision::tf32 : Precision::tf32x3},
                  {"SEG", scan::segment_lengths().front()}};
    if (shared_bytes(constants, config) > limits.shared_bytes) {
      config.set("BK", std::int64_t{32});
      config.set("num_warps", std::int64_t{2});
    }
    return config;
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = cuda::ceil_div(constants.integer("V"), config.integer("BV"));
    return cuda::launch(e.N * constants.integer("HV") * tiles, config,
                        shared_bytes(constants, config));
  };
  return t;
}

/// Scratch of one block, as common/cpu/combine.hpp hands it out.
inline std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t K = constants.integer("K"), BV = config.integer("BV");
  return fp32_bytes(2 * scratch::tile(K, BV) + scratch::tile(K, K) + scratch::vector(K + 8));
}

/// One call: all segments of one sequence, one value head, BV columns of the state.
inline Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = t.name + "/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}, {"BV", {128, 64, 32}}, {"SEG", scan::segment_lengths()}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    const std::string problem =
        column_block_problem("BV", config.integer("BV"), constants.integer("V"));
    return problem.empty() ? scratch_problem(cpu_scratch(constants, config), limits) : problem;
  };
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT},
                  {"BV", column_block(constants.integer("V"), 64)},
                  {"SEG", scan::segment_lengths().front()}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = cuda::ceil_div(constants.integer("V"), config.integer("BV"));
    return Geometry{.grid = {tiles, constants.integer("HV"), e.N},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace wyvern::combine
