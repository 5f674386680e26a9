#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::gate_param_sum {
namespace {

/// What every variant shares. BT says how many chunk slots there are, and nothing else.
Template stage() {
  Template t;
  t.name = "gate_param_sum";
  t.stages = {"gate_param_sum"};
  t.summary = "Gradients of A_log and dt_bias from every chunk's part of them.";
  t.arguments = {
      {"dA_part", Access::in, "fp32", {"NT", "HV"}, "HAS_A_LOG"},
      {"dbias_part", Access::in, "fp32", {"NT", "GATE_HEADS"}, "HAS_DT_BIAS"},
      {"dA_log", Access::out, "fp32", {"HV"}, "HAS_A_LOG"},
      {"ddt_bias", Access::out, "fp32", {"GATE_HEADS"}, "HAS_DT_BIAS"},
  };
  t.constants = {"HAS_A_LOG", "HAS_DT_BIAS", "HV", "GATE_HEADS"};
  return t;
}

/// Blocks of BC columns of both outputs.
std::int64_t tiles(const Values& constants, const Config& config) {
  const std::int64_t BC = config.integer("BC");
  return (constants.flag("HAS_A_LOG") ? cuda::ceil_div(constants.integer("HV"), BC) : 0) +
         (constants.flag("HAS_DT_BIAS") ? cuda::ceil_div(constants.integer("GATE_HEADS"), BC) : 0);
}

/// CUDA, sm_80 and up: one block BC columns and all chunk slots.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})},
                {"BC", cuda::integers({32, 8})},
                {"num_warps", cuda::integers({16, 8, 32, 4})}};
  t.source = "gate_param_sum/portable.cu";
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  // Few columns, as those of a scalar gate, give few blocks: narrow ones then.
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    const std::int64_t BC = constants.integer("GATE_HEADS") >= 1024 ? 32 : 8;
    return Config{{"BT", BT}, {"BC", BC}, {"num_warps", std::int64_t{16}}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents&) {
    const std::int64_t warps = config.integer("num_warps");
    return Geometry{{tiles(constants, config), 1, 1}, warps * 32, warps * config.integer("BC") * 4};
  };
  return t;
}

/// One call: BC columns and all chunk slots.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "gate_param_sum/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}, {"BC", {64, 256}}};
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT}, {"BC", 64}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents&) {
    return Geometry{.grid = {tiles(constants, config), 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::gate_param_sum
