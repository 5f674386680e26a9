#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::gate {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gate";
  t.stages = {"gate"};
  t.summary = "g_log = -exp(A_log) * softplus(g + dt_bias).";
  t.arguments = {
      {"g", Access::in, "G_DTYPE", {"B", "T", "HV"}, ""},
      {"A_log", Access::in, "fp32", {"HV"}, ""},
      {"dt_bias", Access::in, "fp32", {"HV"}, "HAS_DT_BIAS"},
      {"g_log", Access::out, "fp32", {"B", "T", "HV"}, ""},
  };
  t.constants = {"G_DTYPE", "HAS_DT_BIAS", "HV"};
  return t;
}

/// CUDA, sm_80 and up: four elements a thread.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"num_warps", cuda::integers({4, 8})}};
  t.source = "gate/portable.cu";
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [](const Values&, const Limits&, std::int64_t) {
    return Config{{"num_warps", std::int64_t{4}}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t threads = config.integer("num_warps") * 32;
    const std::int64_t count = e.B * e.T * constants.integer("HV");
    return Geometry{{cuda::ceil_div(count, threads * 4), 1, 1}, threads, 0};
  };
  return t;
}

/// One call: ROWS tokens, all heads.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "gate/cpu.cpp";
  t.tunables = {{"ROWS", {256, 64}}};
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [](const Values&, const Limits&, std::int64_t) { return Config{{"ROWS", 256}}; };
  t.geometry = [](const Values&, const Config& config, const Extents& e) {
    const std::int64_t rows = config.integer("ROWS");
    return Geometry{.grid = {(e.B * e.T + rows - 1) / rows, 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::gate
