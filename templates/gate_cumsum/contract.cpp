#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::gate_cumsum {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gate_cumsum";
  t.stages = {"gate", "chunk_local_cumsum"};
  t.summary = "The gate and its running sum inside each chunk, in one pass.";
  t.arguments = {
      {"g", Access::in, "G_DTYPE", {"B", "T", "HV"}, ""},
      {"A_log", Access::in, "fp32", {"HV"}, ""},
      {"dt_bias", Access::in, "fp32", {"HV"}, "HAS_DT_BIAS"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"G", Access::out, "fp32", {"B", "T", "HV"}, ""},
  };
  t.constants = {"G_DTYPE", "HAS_DT_BIAS", "HV", "VARLEN"};
  return t;
}

/// CUDA, sm_80 and up: one block a chunk and up to 32 heads.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})},
                {"num_warps", cuda::integers({4, 2, 8})}};
  t.source = "gate_cumsum/portable.cu";
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT}, {"num_warps", std::int64_t{4}}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t threads = config.integer("num_warps") * 32;
    const std::int64_t groups = cuda::ceil_div(constants.integer("HV"), 32);
    return Geometry{{e.NT * groups, 1, 1}, threads, threads * 4};
  };
  return t;
}

/// One call: a chunk, all heads.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "gate_cumsum/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}};
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) { return Config{{"BT", BT}}; };
  t.geometry = [](const Values&, const Config&, const Extents& e) {
    return Geometry{.grid = {e.NT, 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::gate_cumsum
