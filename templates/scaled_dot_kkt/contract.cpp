#include <algorithm>
#include "templates/cpu_contract.hpp"

#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::scaled_dot_kkt {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "scaled_dot_kkt";
  t.stages = {"scaled_dot_kkt"};
  t.summary = "A = strictly lower part of beta_r exp(G_r - G_s) k_r . k_s, per chunk.";
  t.arguments = {
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, "SCALAR_GATE"},
      {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"A", Access::out, "fp32", {"B", "T", "HV", "BT"}, ""},
  };
  t.constants = {"DTYPE",  "BETA_DTYPE",  "H",         "HV",           "K",
                 "VARLEN", "SCALAR_GATE", "QK_L2NORM", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT");
  return config.integer("num_stages") *
             cuda::tile_bytes(BT, config.integer("BK"), constants.dtype("DTYPE")) +
         (constants.flag("QK_L2NORM") ? 3 : 2) * cuda::column_bytes(BT);
}

std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  const std::int64_t K = constants.integer("K");
  const std::int64_t BK = config.integer("BK");
  const std::int64_t stages = config.integer("num_stages");
  if (std::string reason = cuda::exceeds_dimension("BK", BK, "K", K); !reason.empty())
    return reason;
  if (stages > cuda::ceil_div(K, BK))
    return fmt::format("num_stages={} is more than the {} tiles of K", stages,
                       cuda::ceil_div(K, BK));
  if (config.integer("num_warps") * 16 > config.integer("BT"))
    return fmt::format("num_warps={} is more than BT/16={}", config.integer("num_warps"),
                       config.integer("BT") / 16);
  return cuda::exceeds_shared(shared_bytes(constants, config), limits);
}

/// CUDA, sm_80 and up: one block a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})},
                {"BK", cuda::integers({64, 128, 32})},
                {"num_warps", cuda::integers({4, 2, 1, 8})},
                {"num_stages", cuda::integers({2, 1})},
                {"precision", cuda::kPrecisionValues}};
  t.source = "scaled_dot_kkt/portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    const std::int64_t K = constants.integer("K");
    return Config{{"BT", BT},
                  {"BK", std::int64_t{K > 32 ? 64 : 32}},
                  {"num_warps", std::min<std::int64_t>(BT / 16, 4)},
                  {"num_stages", std::int64_t{K > 64 ? 2 : 1}},
                  {"precision", cuda::default_precision(constants)}};
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

/// Scratch of one block, as scaled_dot_kkt/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT");
  return fp32_bytes(scratch::tile(constants.integer("K"), BT) + 2 * scratch::tile(BT, BT) +
                    3 * scratch::vector(BT));
}

/// One call: a chunk, the value heads of one key head.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "scaled_dot_kkt/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    return scratch_problem(cpu_scratch(constants, config), limits);
  };
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) { return Config{{"BT", BT}}; };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{.grid = {constants.integer("H"), e.NT, 1},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::scaled_dot_kkt
