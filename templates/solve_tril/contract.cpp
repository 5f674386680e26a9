#include <algorithm>
#include "templates/cpu_contract.hpp"

#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::solve_tril {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "solve_tril";
  t.stages = {"solve_tril"};
  t.summary = "Tinv = (I + A)^-1, per chunk.";
  t.arguments = {
      {"A", Access::in, "fp32", {"B", "T", "HV", "BT"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"Tinv", Access::out, "DTYPE", {"B", "T", "HV", "BT"}, ""},
  };
  t.constants = {"DTYPE", "HV", "VARLEN"};
  return t;
}

/// CUDA, sm_80 and up: one block a chunk and value head, the inverse in fp32 in shared memory.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})},
                {"num_warps", cuda::integers({2, 1, 4})},
                {"precision", cuda::kPrecisionValues}};
  t.source = "solve_tril/portable.cu";
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    const std::int64_t BT = config.integer("BT");
    if (config.integer("num_warps") * 32 < BT)
      return fmt::format("num_warps={} is less than BT/32={}", config.integer("num_warps"),
                         BT / 32);
    if (BT == 128 && config.precision("precision") == Precision::tf32 && !cuda::is_half(constants))
      return std::string("precision=tf32 at BT=128 reaches 1e-3, the bound of fp32 results");
    return cuda::exceeds_shared(cuda::tile_bytes(BT, BT, DType::fp32), limits);
  };
  t.redundant = [](const Values&, const Config& config) {
    return config.integer("BT") == 16 && config.precision("precision") != Precision::ieee;
  };
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    const Precision precision = BT == 16                   ? Precision::ieee
                                : cuda::is_half(constants) ? Precision::tf32
                                                           : Precision::tf32x3;
    return Config{
        {"BT", BT}, {"num_warps", std::max<std::int64_t>(BT / 32, 1)}, {"precision", precision}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t BT = config.integer("BT");
    return cuda::launch(e.NT * constants.integer("HV"), config,
                        cuda::tile_bytes(BT, BT, DType::fp32));
  };
  return t;
}

/// Scratch of one block, as solve_tril/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values&, const Config& config) {
  const std::int64_t BT = config.integer("BT");
  return fp32_bytes(2 * scratch::tile(BT, BT) + scratch::tile(16, BT));
}

/// One call: a chunk, one value head.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "solve_tril/cpu.cpp";
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

}  // namespace wyvern::solve_tril
