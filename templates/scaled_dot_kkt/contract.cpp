#include "templates/cpu_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::scaled_dot_kkt {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "scaled_dot_kkt";
  t.stages = {"scaled_dot_kkt"};
  t.summary = "A = strictly lower part of beta_r exp(G_r - G_s) k_r . k_s, per chunk.";
  t.arguments = {
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"A", Access::out, "fp32", {"B", "T", "HV", "BT"}, ""},
  };
  t.constants = {"DTYPE", "BETA_DTYPE", "H", "HV", "K", "VARLEN", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

/// Scratch of one block, as scaled_dot_kkt/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT");
  return fp32_bytes(scratch::tile(constants.integer("K"), BT) + 2 * scratch::tile(BT, BT) +
                    2 * scratch::vector(BT));
}

/// One call: a chunk, the value heads of one key head.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "scaled_dot_kkt/cpu.cpp";
  t.tunables = {{"BT", {16, 32, 64}}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    return scratch_problem(cpu_scratch(constants, config), limits);
  };
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) { return Config{{"BT", BT}}; };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{.grid = {constants.integer("H"), e.NT, 1},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {cpu(stage())}; }

}  // namespace wyvern::scaled_dot_kkt
