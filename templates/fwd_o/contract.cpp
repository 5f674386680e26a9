#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::fwd_o {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_o";
  t.stages = {"fwd_o"};
  t.summary = "O = scale ((exp(G) Q) S + P V'), per chunk.";
  t.arguments = {
      {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v_new", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"h", Access::in, "DTYPE", {"NT", "HV", "K", "V"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"o", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
  };
  t.constants = {"DTYPE", "H", "HV", "K", "V", "VARLEN"};
  return t;
}

/// Scratch of one block, as fwd_o/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  const std::int64_t K = constants.integer("K");
  return fp32_bytes(scratch::tile(BT, K) + scratch::tile(K, BT) + 2 * scratch::tile(BT, BT) +
                    scratch::tile(std::max(K, BT), BV) + scratch::tile(BT, BV) +
                    3 * scratch::vector(BT));
}

/// One call: a chunk, the value heads of one key head, BV columns of V at a time.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "fwd_o/cpu.cpp";
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
    return Geometry{.grid = {constants.integer("H"), e.NT, 1},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {cpu(stage())}; }

}  // namespace wyvern::fwd_o
