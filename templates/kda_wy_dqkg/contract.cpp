#include "templates/cpu_contract.hpp"
#include "templates/kda_backward_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_wy_dqkg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_wy_dqkg";
  t.stages = {"kda_bwd_dqkg", "kda_intra_bwd"};
  t.summary = "KDA: dq, dk, dv, dbeta and dGk of a chunk at once.";
  t.arguments = kda_backward::inputs();
  const std::vector<std::string> keys{"B", "T", "HV", "K"};
  for (Argument output : {
           Argument{"dq", Access::out, "DTYPE", keys, ""},
           Argument{"dk", Access::out, "DTYPE", keys, ""},
           Argument{"dv", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
           Argument{"dbeta", Access::out, "BETA_DTYPE", {"B", "T", "HV"}, ""},
           Argument{"dGk", Access::out, "fp32", keys, ""},
       })
    t.arguments.push_back(std::move(output));
  t.constants = {"DTYPE",  "BETA_DTYPE", "H",         "HV",           "K",         "V",
                 "VARLEN", "SAFE_GATE",  "QK_L2NORM", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

/// That of the block, and dAqk and dA with dAqk's diagonal.
std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const DType factor = cuda::is_half(constants) ? DType::bf16 : DType::fp32;
  const std::int64_t BT = config.integer("BT");
  return kda_backward::shared_bytes(constants, config) + 2 * cuda::tile_bytes(BT, BT, factor) +
         cuda::column_bytes(BT);
}

/// kda_backward's, with a minimum of blocks a multiprocessor.
Template portable() {
  Template t = kda_backward::portable(stage(), shared_bytes);
  t.tunables.insert(t.tunables.end() - 1, {"min_blocks", cuda::integers({0, 2, 4})});
  t.illegal = [rest = t.illegal](const Values& constants, const Config& config,
                                 const Limits& limits) {
    const std::string reason = rest(constants, config, limits);
    return reason.empty()
               ? cuda::min_blocks_problem(config, shared_bytes(constants, config), limits)
               : reason;
  };
  t.fallback = [rest = t.fallback](const Values& constants, const Limits& limits, std::int64_t BT) {
    Config config = rest(constants, limits, BT);
    config.set("min_blocks", std::int64_t{0});
    return config;
  };
  return t;
}

/// Scratch of one block, as kda_wy_dqkg/cpu.cpp hands it out.
std::int64_t scratch_floats(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  return kda_backward::state_scratch(BT, BK, constants.integer("V")) +
         kda_backward::intra_scratch(BT, BK) + 2 * scratch::tile(BT, BT) + 2 * scratch::vector(BT) +
         scratch::vector(BT * 16);
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu_chunks(stage(), scratch_floats)}; }

}  // namespace wyvern::kda_wy_dqkg
