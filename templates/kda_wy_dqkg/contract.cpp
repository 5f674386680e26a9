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

std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  if (std::string reason = kda_backward::unsuitable(constants, config); !reason.empty())
    return reason;
  const std::int64_t blocks = config.integer("min_blocks");
  if (blocks > 0 && blocks * config.integer("num_warps") != 16)
    return fmt::format("min_blocks={} of {} warps is not the 16 warps that 128 registers allow",
                       blocks, config.integer("num_warps"));
  if (blocks * shared_bytes(constants, config) > limits.shared_bytes)
    return fmt::format("min_blocks={} do not fit into shared memory", blocks);
  return cuda::exceeds_shared(shared_bytes(constants, config), limits);
}

/// CUDA, sm_80 and up: one block a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16})},        {"BK", cuda::integers({32, 64, 16})},
                {"num_warps", cuda::integers({4, 8, 2, 1})}, {"num_stages", cuda::integers({1, 2})},
                {"min_blocks", cuda::integers({0, 2, 4})},   {"precision", cuda::kPrecisionValues}};
  t.source = "kda_wy_dqkg/portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT},
                  {"BK", std::int64_t{32}},
                  {"num_warps", BT / 8},
                  {"num_stages", std::int64_t{1}},
                  {"min_blocks", std::int64_t{0}},
                  {"precision", cuda::default_precision(constants)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{{e.NT * constants.integer("HV"), 1, 1},
                    config.integer("num_warps") * 32,
                    shared_bytes(constants, config)};
  };
  return t;
}

/// Scratch of one block, as kda_wy_dqkg/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  return fp32_bytes(kda_backward::state_scratch(BT, BK, constants.integer("V")) +
                    kda_backward::intra_scratch(BT, BK) + 2 * scratch::tile(BT, BT) +
                    2 * scratch::vector(BT) + scratch::vector(BT * 16));
}

/// One call: a chunk, one value head, BK columns of K at a time.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "kda_wy_dqkg/cpu.cpp";
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

}  // namespace wyvern::kda_wy_dqkg
