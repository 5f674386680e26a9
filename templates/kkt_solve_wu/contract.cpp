#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kkt_solve_wu {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kkt_solve_wu";
  t.stages = {"scaled_dot_kkt", "solve_tril", "recompute_w_u"};
  t.summary = "W and U from k, v, beta and G in one kernel: A and its inverse stay on chip.";
  t.arguments = {
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"G", Access::in, "fp32", {"B", "T", "HV"}, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
      {"w", Access::out, "DTYPE", {"B", "T", "HV", "K"}, ""},
      {"u", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
  };
  t.constants = {"DTYPE", "BETA_DTYPE", "H", "HV", "K", "V", "VARLEN", "BETA_SIGMOID", "NEG_EIGVAL"};
  return t;
}

/// Scratch of one block, as kkt_solve_wu/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BT = config.integer("BT"), BV = config.integer("BV");
  const std::int64_t K = constants.integer("K");
  return fp32_bytes(scratch::tile(BT, K) + scratch::tile(K, BT) + 3 * scratch::tile(BT, BT) +
                    scratch::tile(16, BT) + scratch::tile(BT, BV) +
                    scratch::tile(BT, std::max(K, BV)) + 2 * scratch::vector(BT));
}

/// One call: a chunk, the value heads of one key head, BV columns of V at a time.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "kkt_solve_wu/cpu.cpp";
  t.tunables = {{"BT", {16, 32, 64}}, {"BV", {32, 64, 128}}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    const std::string problem =
        column_block_problem("BV", config.integer("BV"), constants.integer("V"));
    return problem.empty() ? scratch_problem(cpu_scratch(constants, config), limits) : problem;
  };
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT}, {"BV", column_block(constants.integer("V"), 128)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{.grid = {constants.integer("H"), e.NT, 1},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {cpu(stage())}; }

}  // namespace wyvern::kkt_solve_wu
