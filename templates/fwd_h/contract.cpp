#include "templates/cpu_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::fwd_h {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h";
  t.stages = {"fwd_h"};
  t.summary = "The state scan: every chunk's entering state, V' = U - W S, and the final state.";
  t.arguments = {
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"w", Access::in, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"u", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, ""},
      {"initial_state", Access::in, "STATE_DTYPE", {"N", "HV", "STATE_ROWS", "STATE_COLS"}, "INITIAL_STATE"},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"h", Access::out, "DTYPE", {"NT", "HV", "K", "V"}, ""},
      {"v_new", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"final_state", Access::out, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"}, "FINAL_STATE"},
  };
  t.constants = {"DTYPE", "STATE_DTYPE", "H", "HV", "K", "V", "VARLEN", "INITIAL_STATE", "FINAL_STATE", "STATE_V_FIRST"};
  return t;
}

/// Scratch of one block, as fwd_h/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  const std::int64_t K = constants.integer("K");
  return fp32_bytes(scratch::tile(K, BV) + scratch::tile(BT, K) + scratch::tile(BT, BV) +
                    2 * scratch::vector(BT) + scratch::vector(K));
}

/// One call: all chunks of one sequence, one value head, BV columns of the state.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "fwd_h/cpu.cpp";
  t.tunables = {{"BT", {16, 32, 64}}, {"BV", {32, 64, 128}}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    const std::string problem =
        column_block_problem("BV", config.integer("BV"), constants.integer("V"));
    return problem.empty() ? scratch_problem(cpu_scratch(constants, config), limits) : problem;
  };
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT}, {"BV", column_block(constants.integer("V"), 64)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t BV = config.integer("BV");
    return Geometry{.grid = {(constants.integer("V") + BV - 1) / BV, constants.integer("HV"), e.N},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {cpu(stage())}; }

}  // namespace wyvern::fwd_h
