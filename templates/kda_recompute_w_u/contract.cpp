#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_recompute_w_u {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_recompute_w_u";
  t.stages = {"kda_recompute_w_u"};
  t.summary = "W = Tinv diag(beta) (exp(Gk) K), U = Tinv diag(beta) V, decayed q and k, per chunk.";
  t.arguments = {
      {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"Tinv", Access::in, "DTYPE", {"B", "T", "HV", "BT"}, ""},
      {"Gk", Access::in, "fp32", {"B", "T", "HV", "K"}, ""},
      {"q_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"w", Access::out, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"qg", Access::out, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"kg", Access::out, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"u", Access::out, "U_DTYPE", {"B", "T", "HV", "V"}, ""},
  };
  t.constants = {"DTYPE",  "U_DTYPE",   "BETA_DTYPE",   "H",         "HV", "K", "V",
                 "VARLEN", "QK_L2NORM", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const DType type = constants.dtype("DTYPE");
  const std::int64_t BT = config.integer("BT");
  const std::int64_t BK = config.integer("BK");
  return cuda::tile_bytes(BT, BT, type) +
         (constants.flag("QK_L2NORM") ? 3 : 1) * cuda::column_bytes(BT) +
         std::max(2 * cuda::tile_bytes(BT, BK, type) + cuda::tile_bytes(BT, BK, DType::fp32),
                  cuda::tile_bytes(BT, config.integer("BV"), type));
}

std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  const std::int64_t BK = config.integer("BK");
  const std::int64_t BV = config.integer("BV");
  for (std::string reason : {cuda::exceeds_dimension("BK", BK, "K", constants.integer("K")),
                             cuda::exceeds_dimension("BV", BV, "V", constants.integer("V"))})
    if (!reason.empty()) return reason;
  if (config.integer("num_warps") * 16 > std::max(BK, BV))
    return fmt::format("num_warps={} leaves warps without columns", config.integer("num_warps"));
  return cuda::exceeds_shared(shared_bytes(constants, config), limits);
}

/// CUDA, sm_80 and up: one block a tile of columns of W, qg and kg, or of U.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16})},
                {"BK", cuda::integers({64, 128, 32})},
                {"BV", cuda::integers({64, 128, 32})},
                {"num_warps", cuda::integers({4, 2, 8})},
                {"precision", cuda::kPrecisionValues}};
  t.source = "kda_recompute_w_u/portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT},
                  {"BK", std::int64_t{constants.integer("K") > 32 ? 64 : 32}},
                  {"BV", std::int64_t{constants.integer("V") > 32 ? 64 : 32}},
                  {"num_warps", std::int64_t{2}},
                  {"precision", cuda::default_precision(constants)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = cuda::ceil_div(constants.integer("K"), config.integer("BK")) +
                               cuda::ceil_div(constants.integer("V"), config.integer("BV"));
    return cuda::launch(e.NT * constants.integer("HV") * tiles, config,
                        shared_bytes(constants, config));
  };
  return t;
}

/// Scratch of one block, as kda_recompute_w_u/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values&, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  return fp32_bytes(scratch::tile(BT, BT) + 4 * scratch::tile(BT, BV) + 3 * scratch::vector(BT));
}

std::int64_t widest_operand(const Values& constants) {
  return std::max(constants.integer("K"), constants.integer("V"));
}

/// One call: a chunk, one value head, BV columns of V and then of K at a time.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "kda_recompute_w_u/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}, {"BV", {128, 64}}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    const std::string problem =
        column_block_problem("BV", config.integer("BV"), widest_operand(constants));
    return problem.empty() ? scratch_problem(cpu_scratch(constants, config), limits) : problem;
  };
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT}, {"BV", column_block(widest_operand(constants), 128)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{.grid = {constants.integer("HV"), e.NT, 1},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::kda_recompute_w_u
