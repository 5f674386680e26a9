#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::kkt_solve_wu {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kkt_solve_wu";
  t.stages = {"scaled_dot_kkt", "solve_tril", "recompute_w_u"};
  t.summary = "W and U from k, v, beta and G in one kernel: A and its inverse stay on chip.";
  t.arguments = {
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
      {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"w", Access::out, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"u", Access::out, "U_DTYPE", {"B", "T", "HV", "V"}, ""},
      {"Tinv", Access::out, "DTYPE", {"B", "T", "HV", "BT"}, "KEEP_INVERSE"},
  };
  t.constants = {"DTYPE",       "U_DTYPE", "BETA_DTYPE",  "H",         "HV",           "K",
                 "V",           "VARLEN",  "SCALAR_GATE", "QK_L2NORM", "BETA_SIGMOID", "NEG_EIGVAL",
                 "KEEP_INVERSE"};
  return t;
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const DType type = constants.dtype("DTYPE");
  const std::int64_t BT = config.integer("BT");
  return cuda::tile_bytes(BT, constants.integer("K"), type) +
         cuda::tile_bytes(BT, config.integer("BV"), type) + cuda::tile_bytes(BT, BT, DType::fp32) +
         (constants.flag("QK_L2NORM") ? 4 : 3) * cuda::column_bytes(BT);
}

std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  const std::int64_t BT = config.integer("BT");
  const std::int64_t BV = config.integer("BV");
  const std::int64_t warps = config.integer("num_warps");
  if (std::string reason = cuda::exceeds_dimension("BV", BV, "V", constants.integer("V"));
      !reason.empty())
    return reason;
  if (warps * 32 < BT) return fmt::format("num_warps={} is less than BT/32={}", warps, BT / 32);
  if (warps * 8 > BV) return fmt::format("num_warps={} leaves warps without columns", warps);
  return cuda::exceeds_shared(shared_bytes(constants, config), limits);
}

/// CUDA, sm_80 and up: one block a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16})},
                {"BV", cuda::integers({128, 64, 32})},
                {"num_warps", cuda::integers({4, 8, 2})},
                {"precision", cuda::kPrecisionValues}};
  t.source = "kkt_solve_wu/portable.cu";
  t.illegal = illegal;
  t.redundant = [](const Values& constants, const Config& config) {
    return config.integer("BT") == 16 && cuda::repeats_precision(constants, config);
  };
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    const std::int64_t V = constants.integer("V");
    const bool half = cuda::is_half(constants);
    return Config{{"BT", BT},
                  {"BV", std::int64_t{V > 64 && half ? 128
                                      : V > 32       ? 64
                                                     : 32}},
                  {"num_warps", std::int64_t{BT >= 64 ? 4 : 2}},
                  {"precision", !half      ? Precision::tf32x3
                                : BT == 16 ? Precision::ieee
                                           : Precision::tf32}};
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

/// Scratch of one block, as kkt_solve_wu/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  const std::int64_t K = constants.integer("K");
  return fp32_bytes(scratch::tile(BT, K) + scratch::tile(K, BT) + 3 * scratch::tile(BT, BT) +
                    scratch::tile(16, BT) + scratch::tile(BT, BV) +
                    scratch::tile(BT, std::max(K, BV)) + 4 * scratch::vector(BT));
}

/// One call: a chunk, the value heads of one key head, BV columns of V at a time.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "kkt_solve_wu/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}, {"BV", {128, 64}}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    const std::string problem =
        column_block_problem("BV", config.integer("BV"), constants.integer("V"));
    return problem.empty() ? scratch_problem(cpu_scratch(constants, config), limits) : problem;
  };
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT}, {"BV", column_block(constants.integer("V"), 128)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{.grid = {constants.integer("H"), e.NT, 1},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::kkt_solve_wu
