#include "templates/cpu_contract.hpp"
#include "templates/kda_backward_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_intra_bwd {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_intra_bwd";
  t.stages = {"kda_intra_bwd"};
  t.summary = "KDA: dq, dk, dbeta and dGk, the products inside a chunk added to the other parts.";
  const std::vector<std::string> keys{"B", "T", "HV", "K"}, heads{"B", "T", "HV"};
  t.arguments = {
      {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"beta", Access::in, "BETA_DTYPE", heads, ""},
      {"Gk", Access::in, "fp32", keys, ""},
      {"q_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"dAqk", Access::in, "fp32", {"B", "T", "HV", "BT"}, ""},
      {"dA", Access::in, "fp32", {"B", "T", "HV", "BT"}, ""},
      {"dq_inter", Access::in, "fp32", keys, ""},
      {"dk_inter", Access::in, "fp32", keys, ""},
      {"dbeta_inter", Access::in, "fp32", heads, ""},
      {"dGk_inter", Access::in, "fp32", keys, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"dq", Access::out, "DTYPE", keys, ""},
      {"dk", Access::out, "DTYPE", keys, ""},
      {"dbeta", Access::out, "BETA_DTYPE", heads, ""},
      {"dGk", Access::out, "fp32", keys, ""},
  };
  t.constants = {"DTYPE",  "BETA_DTYPE", "H",         "HV",           "K",
                 "VARLEN", "SAFE_GATE",  "QK_L2NORM", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const DType type = constants.dtype("DTYPE");
  const DType factor = cuda::is_half(constants) ? DType::bf16 : DType::fp32;
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  const std::int64_t groups = config.integer("num_warps") * 16 / BT;
  return 2 * cuda::tile_bytes(BT, BT, factor) + 2 * cuda::tile_bytes(BT, BK, type) +
         cuda::tile_bytes(BT, BK, DType::fp32) +
         (constants.flag("QK_L2NORM") ? 4 : 2) * cuda::column_bytes(BT) +
         cuda::column_bytes(groups * BT);
}

std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  for (std::string reason :
       {cuda::exceeds_dimension("BK", config.integer("BK"), "K", constants.integer("K")),
        kda_backward::uneven_warps(config)})
    if (!reason.empty()) return reason;
  return cuda::exceeds_shared(shared_bytes(constants, config), limits);
}

/// CUDA, sm_80 and up: one block a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})},
                {"BK", cuda::integers({32, 64, 128})},
                {"num_warps", cuda::integers({4, 8, 2, 1})},
                {"precision", cuda::kPrecisionValues}};
  t.source = "kda_intra_bwd/portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT},
                  {"BK", std::int64_t{32}},
                  {"num_warps", BT / 16},
                  {"precision", cuda::default_precision(constants)}};
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

/// Scratch of one block, as kda_intra_bwd/cpu.cpp hands it out.
std::int64_t scratch_floats(const Values&, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  return 6 * scratch::tile(BT, BK) + kda_backward::intra_scratch(BT, BK) +
         2 * scratch::tile(BT, BT) + 5 * scratch::vector(BT) + scratch::vector(BT * 16);
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu_chunks(stage(), scratch_floats)}; }

}  // namespace wyvern::kda_intra_bwd
