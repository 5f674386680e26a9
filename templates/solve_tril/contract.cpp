#include "templates/cpu_contract.hpp"
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
  t.tunables = {{"BT", {16, 32, 64}}};
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

std::vector<Template> contract() { return {cpu(stage())}; }

}  // namespace wyvern::solve_tril
