#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_bwd_dv_local {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_bwd_dv_local";
  t.stages = {"kda_bwd_dv_local"};
  t.summary = "dv_local = scale Aqk^T dO, per chunk.";
  t.arguments = {
      {"Aqk", Access::in, "fp32", {"B", "T", "HV", "BT"}, ""},
      {"do", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"dv_local", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
  };
  t.constants = {"DTYPE", "HV", "V", "VARLEN"};
  return t;
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT");
  return cuda::tile_bytes(BT, BT, DType::fp32) +
         cuda::tile_bytes(BT, config.integer("BV"), constants.dtype("DTYPE"));
}

std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  const std::int64_t BT = config.integer("BT");
  const std::int64_t BV = config.integer("BV");
  const std::int64_t warps = config.integer("num_warps");
  if (std::string reason = cuda::exceeds_dimension("BV", BV, "V", constants.integer("V"));
      !reason.empty())
    return reason;
  const std::int64_t strips = std::max<std::int64_t>(BT / 16 / warps, 1);
  const std::int64_t across = warps * strips * 16 / BT;
  if (BV % (across * 16) != 0)
    return fmt::format("num_warps={} leaves warps without columns", warps);
  if (strips > 2 || across > 4)
    return fmt::format("num_warps={} does not suit a {} by {} tile", warps, BT, BV);
  return cuda::exceeds_shared(shared_bytes(constants, config), limits);
}

/// CUDA, sm_80 and up: one block BV value columns of a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16})},
                {"BV", cuda::integers({128, 64, 32})},
                {"num_warps", cuda::integers({4, 8, 2})},
                {"precision", cuda::kPrecisionValues}};
  t.source = "kda_bwd_dv_local/portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    const std::int64_t V = constants.integer("V");
    return Config{{"BT", BT},
                  {"BV", std::int64_t{V > 64   ? 128
                                      : V > 32 ? 64
                                               : 32}},
                  {"num_warps", std::int64_t{BT == 64 ? 4 : 2}},
                  {"precision", cuda::default_precision(constants)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = cuda::ceil_div(constants.integer("V"), config.integer("BV"));
    return cuda::launch(e.NT * constants.integer("HV") * tiles, config,
                        shared_bytes(constants, config));
  };
  return t;
}

/// Scratch of one block, as kda_bwd_dv_local/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values&, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  return fp32_bytes(scratch::tile(BT, BT) + 2 * scratch::tile(BT, BV));
}

/// One call: a chunk, one value head, BV columns of V at a time.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "kda_bwd_dv_local/cpu.cpp";
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
    return Geometry{.grid = {constants.integer("HV"), e.NT, 1},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::kda_bwd_dv_local
