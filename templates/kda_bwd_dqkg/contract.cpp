#include "templates/cpu_contract.hpp"
#include "templates/kda_backward_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_bwd_dqkg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_bwd_dqkg";
  t.stages = {"kda_bwd_dqkg"};
  t.summary = "KDA: dv, dAqk and dA, and what goes through states of dq, dk, dbeta and dGk.";
  t.arguments = kda_backward::inputs();
  const std::vector<std::string> keys{"B", "T", "HV", "K"}, squares{"B", "T", "HV", "BT"};
  for (Argument output : {
           Argument{"dq_inter", Access::out, "fp32", keys, ""},
           Argument{"dk_inter", Access::out, "fp32", keys, ""},
           Argument{"dGk_inter", Access::out, "fp32", keys, ""},
           Argument{"dv", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
           Argument{"dbeta_inter", Access::out, "fp32", {"B", "T", "HV"}, ""},
           Argument{"dAqk", Access::out, "fp32", squares, ""},
           Argument{"dA", Access::out, "fp32", squares, ""},
       })
    t.arguments.push_back(std::move(output));
  t.constants = {"DTYPE", "BETA_DTYPE", "H",         "HV",           "K",
                 "V",     "VARLEN",     "QK_L2NORM", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  const std::string reason = kda_backward::unsuitable(constants, config);
  return reason.empty()
             ? cuda::exceeds_shared(kda_backward::shared_bytes(constants, config), limits)
             : reason;
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
                    kda_backward::shared_bytes(constants, config)};
  };
  return t;
}

/// Scratch of one block, as kda_bwd_dqkg/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  return fp32_bytes(kda_backward::state_scratch(BT, BK, constants.integer("V")));
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
