#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_intra {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_intra";
  t.stages = {"kda_intra"};
  t.summary =
      "Aqk = lower part of q_r . exp(Gk_r - Gk_s) k_s, A the same of beta_r k_r, per chunk.";
  t.arguments = {
      {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"Gk", Access::in, "fp32", {"B", "T", "HV", "K"}, ""},
      {"q_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"Aqk", Access::out, "fp32", {"B", "T", "HV", "BT"}, ""},
      {"A", Access::out, "fp32", {"B", "T", "HV", "BT"}, ""},
  };
  t.constants = {"DTYPE",  "BETA_DTYPE", "H",         "HV",           "K",
                 "VARLEN", "SAFE_GATE",  "QK_L2NORM", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT");
  const std::int64_t BK = config.integer("BK");
  const std::int64_t tiles =
      config.integer("num_stages") * (2 * cuda::tile_bytes(BT, BK, constants.dtype("DTYPE")) +
                                      cuda::tile_bytes(BT, BK, DType::fp32));
  return std::max(tiles, cuda::intra_part_bytes(BT, config.integer("num_warps"))) +
         (constants.flag("QK_L2NORM") ? 3 : 1) * cuda::column_bytes(BT);
}

std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  const std::int64_t K = constants.integer("K");
  const std::int64_t BT = config.integer("BT");
  const std::int64_t BK = config.integer("BK");
  const std::int64_t warps = config.integer("num_warps");
  const std::int64_t stages = config.integer("num_stages");
  if (std::string reason = cuda::exceeds_dimension("BK", BK, "K", K); !reason.empty())
    return reason;
  if (stages > cuda::ceil_div(K, BK))
    return fmt::format("num_stages={} is more than the {} tiles of K", stages,
                       cuda::ceil_div(K, BK));
  if (warps < BT / 16 || warps > BT / 4)
    return fmt::format("num_warps={} is not between BT/16={} and BT/4={}", warps, BT / 16, BT / 4);
  return cuda::exceeds_shared(shared_bytes(constants, config), limits);
}

/// CUDA, sm_80 and up: one block a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16})},
                {"BK", cuda::integers({64, 128, 32})},
                {"num_warps", cuda::integers({4, 8, 2, 1})},
                {"num_stages", cuda::integers({2, 1})},
                {"precision", cuda::kPrecisionValues}};
  t.source = "kda_intra/portable.cu";
  t.illegal = illegal;
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    const std::int64_t K = constants.integer("K");
    const bool half = cuda::is_half(constants);
    return Config{{"BT", BT},
                  {"BK", std::int64_t{K > 32 ? 64 : 32}},
                  {"num_warps", std::max<std::int64_t>(BT / 16, 2)},
                  {"num_stages", std::int64_t{K > 64 && half ? 2 : 1}},
                  {"precision", half ? Precision::tf32 : Precision::tf32x3}};
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

/// Scratch of one block, as kda_intra/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT");
  const std::int64_t K = constants.integer("K");
  const std::int64_t strip = constants.flag("SAFE_GATE") ? 16 : 8;
  return fp32_bytes(3 * scratch::tile(BT, K) + 3 * scratch::tile(K, BT) +
                    scratch::tile(2 * strip, K) + scratch::tile(2 * strip, BT) +
                    2 * scratch::vector(BT));
}

/// One call: a chunk, one value head.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "kda_intra/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    return scratch_problem(cpu_scratch(constants, config), limits);
  };
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) { return Config{{"BT", BT}}; };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{.grid = {constants.integer("HV"), e.NT, 1},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::kda_intra
