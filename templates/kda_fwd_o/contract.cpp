#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_fwd_o {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_fwd_o";
  t.stages = {"kda_fwd_o"};
  t.summary = "O = scale (qg S + Aqk V'), per chunk.";
  t.arguments = {
      {"qg", Access::in, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"Aqk", Access::in, "fp32", {"B", "T", "HV", "BT"}, ""},
      {"v_new", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"h", Access::in, "DTYPE", {"NT", "HV", "K", "V"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"o", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
  };
  t.constants = {"DTYPE", "HV", "K", "V", "VARLEN"};
  return t;
}

std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const DType type = constants.dtype("DTYPE");
  const std::int64_t BT = config.integer("BT");
  const std::int64_t BK = config.integer("BK");
  const std::int64_t BV = config.integer("BV");
  return config.integer("num_stages") *
             (cuda::tile_bytes(BT, BK, type) + cuda::tile_bytes(BK, BV, type)) +
         cuda::tile_bytes(BT, BV, type);
}

std::string illegal(const Values& constants, const Config& config, const Limits& limits) {
  const std::int64_t K = constants.integer("K");
  const std::int64_t BT = config.integer("BT");
  const std::int64_t BK = config.integer("BK");
  const std::int64_t BV = config.integer("BV");
  const std::int64_t warps = config.integer("num_warps");
  const std::int64_t stages = config.integer("num_stages");
  for (std::string reason : {cuda::exceeds_dimension("BK", BK, "K", K),
                             cuda::exceeds_dimension("BV", BV, "V", constants.integer("V"))})
    if (!reason.empty()) return reason;
  if (stages > cuda::ceil_div(K, BK))
    return fmt::format("num_stages={} is more than the {} tiles of K", stages,
                       cuda::ceil_div(K, BK));
  const std::int64_t strips = std::max<std::int64_t>(BT / 16 / warps, 1);
  const std::int64_t across = warps * strips * 16 / BT;
  if (BV % (across * 16) != 0)
    return fmt::format("num_warps={} leaves warps without columns", warps);
  if (strips > 2 || across > 4 || strips * (BV / across + BT) / 2 > cuda::kMaxAccumulators)
    return fmt::format("num_warps={} does not suit a {} by {} tile", warps, BT, BV);
  return cuda::exceeds_shared(shared_bytes(constants, config), limits);
}

/// CUDA, sm_80 and up: one block BV value columns of a chunk and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16})},   {"BK", cuda::integers({64, 128, 32})},
                {"BV", cuda::integers({128, 64, 32})},  {"num_warps", cuda::integers({4, 8, 2})},
                {"num_stages", cuda::integers({2, 1})}, {"precision", cuda::kPrecisionValues}};
  t.source = "kda_fwd_o/portable.cu";
  t.illegal = illegal;
  t.redundant = cuda::repeats_precision;
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    const std::int64_t K = constants.integer("K");
    const std::int64_t V = constants.integer("V");
    return Config{{"BT", BT},
                  {"BK", std::int64_t{K > 32 ? 64 : 32}},
                  {"BV", std::int64_t{V > 64 && cuda::is_half(constants) ? 128
                                      : V > 32                           ? 64
                                                                         : 32}},
                  {"num_warps", std::int64_t{BT == 64 ? 4 : 2}},
                  {"num_stages", std::int64_t{K > 64 && cuda::is_half(constants) ? 2 : 1}},
                  {"precision", cuda::default_precision(constants)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = cuda::ceil_div(constants.integer("V"), config.integer("BV"));
    return cuda::launch(e.NT * constants.integer("HV") * tiles, config,
                        shared_bytes(constants, config));
  };
  return t;
}

/// Scratch of one block, as kda_fwd_o/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  const std::int64_t K = constants.integer("K");
  return fp32_bytes(scratch::tile(BT, K) + scratch::tile(BT, BT) +
                    scratch::tile(std::max(K, BT), BV) + scratch::tile(BT, BV) +
                    scratch::vector(BT));
}

/// One call: a chunk, one value head, BV columns of V at a time.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "kda_fwd_o/cpu.cpp";
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

}  // namespace wyvern::kda_fwd_o
