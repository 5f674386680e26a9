#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_bwd_dqkg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_bwd_dqkg";
  t.stages = {"kda_bwd_dqkg"};
  t.summary = "KDA: dv, dAqk and dA, and what goes through states of dq, dk, dbeta and dGk.";
  const std::vector<std::string> keys{"B", "T", "HV", "K"}, values{"B", "T", "HV", "V"};
  const std::vector<std::string> states{"NT", "HV", "K", "V"}, squares{"B", "T", "HV", "BT"};
  t.arguments = {
      {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v", Access::in, "DTYPE", values, ""},
      {"v_new", Access::in, "DTYPE", values, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"Tinv", Access::in, "DTYPE", squares, ""},
      {"Gk", Access::in, "fp32", keys, ""},
      {"q_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"h", Access::in, "DTYPE", states, ""},
      {"dh", Access::in, "DTYPE", states, ""},
      {"do", Access::in, "DTYPE", values, ""},
      {"du", Access::in, "DTYPE", values, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"dq_inter", Access::out, "fp32", keys, ""},
      {"dk_inter", Access::out, "fp32", keys, ""},
      {"dGk_inter", Access::out, "fp32", keys, ""},
      {"dv", Access::out, "DTYPE", values, ""},
      {"dbeta_inter", Access::out, "fp32", {"B", "T", "HV"}, ""},
      {"dAqk", Access::out, "fp32", squares, ""},
      {"dA", Access::out, "fp32", squares, ""},
  };
  t.constants = {"DTYPE", "BETA_DTYPE", "H", "HV", "K", "V", "VARLEN",
                 "QK_L2NORM", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const DType type = constants.dtype("DTYPE");
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  const std::int64_t V = constants.integer("V");
  const std::int64_t buffer = 2 * cuda::tile_bytes(BK, V, type) +
                              2 * cuda::tile_bytes(BT, BK, type) +
                              cuda::tile_bytes(BT, BK, DType::fp32);
  return std::max(config.integer("num_stages") * buffer, cuda::tile_bytes(BT, BT, type)) +
         3 * cuda::tile_bytes(BT, V, type) +
         (constants.flag("QK_L2NORM") ? 3 : 1) * cuda::column_bytes(BT) +
         cuda::column_bytes(config.integer("num_warps") * BT) + cuda::column_bytes(BK) +
         cuda::column_bytes(BT / 16 * BK);
}

std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  const std::int64_t BK = config.integer("BK"), BT = config.integer("BT");
  const std::int64_t K = constants.integer("K");
  const std::int64_t warps = config.integer("num_warps");
  const std::int64_t stages = config.integer("num_stages");
  if (std::string reason = cuda::exceeds_dimension("BK", BK, "K", K); !reason.empty())
    return reason;
  if (warps % (BT / 16) != 0)
    return fmt::format("num_warps={} does not share out the {} strips of BT={}", warps, BT / 16,
                       BT);
  if (BK % (warps * 256 / BT) != 0)
    return fmt::format("num_warps={} leaves warps without 16 columns of BK={}", warps, BK);
  if (stages > cuda::ceil_div(K, BK))
    return fmt::format("num_stages={} is more than the {} tiles of K", stages,
                       cuda::ceil_div(K, BK));
  return cuda::exceeds_shared(shared_bytes(constants, config), limits);
}

/// CUDA, sm_80 and up: one block a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16})},
                {"BK", cuda::integers({32, 64, 16})},
                {"num_warps", cuda::integers({4, 8, 2, 1})},
                {"num_stages", cuda::integers({1, 2})},
                {"precision", cuda::kPrecisionValues}};
  t.source = "kda_bwd_dqkg/portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT},
                  {"BK", std::int64_t{32}},
                  {"num_warps", BT / 8},
                  {"num_stages", std::int64_t{1}},
                  {"precision", cuda::default_precision(constants)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{{e.NT * constants.integer("HV"), 1, 1},
                    config.integer("num_warps") * 32,
                    shared_bytes(constants, config)};
  };
  return t;
}

/// Scratch of one block, as kda_bwd_dqkg/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  const std::int64_t V = constants.integer("V");
  return fp32_bytes(3 * scratch::tile(BT, V) + scratch::tile(V, BT) + 2 * scratch::tile(V, BK) +
                    scratch::tile(BT, BT) + 6 * scratch::tile(BT, BK) + scratch::vector(BK) +
                    4 * scratch::vector(BT));
}

/// One call: a chunk, one value head, BK columns of K at a time.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "kda_bwd_dqkg/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}, {"BK", {128, 64}}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    const std::string problem =
        column_block_problem("BK", config.integer("BK"), constants.integer("K"));
    return problem.empty() ? scratch_problem(cpu_scratch(constants, config), limits) : problem;
  };
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT}, {"BK", column_block(constants.integer("K"), 128)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{.grid = {constants.integer("HV"), e.NT, 1},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::kda_bwd_dqkg
