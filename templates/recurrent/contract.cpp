#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::recurrent {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "recurrent";
  t.stages = {"recurrent"};
  t.summary = "The recurrence token by token, for a few tokens a sequence.";
  const std::vector<std::string> pool{"S", "HV", "STATE_ROWS", "STATE_COLS"};
  t.arguments = {
      {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v", Access::in, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"g", Access::in, "G_DTYPE", {"B", "T", "GATE_HEADS"}, "GATED"},
      {"A_log", Access::in, "fp32", {"HV"}, "HAS_A_LOG"},
      {"dt_bias", Access::in, "fp32", {"GATE_HEADS"}, "GATE_IN_KERNEL,HAS_DT_BIAS"},
      {"cu_seqlens", Access::in, "SEQLENS_DTYPE", {"N+1"}, "VARLEN"},
      {"state_index", Access::in, "INDEX_DTYPE", {"N"}, "STATE_INDEX"},
      {"initial_state", Access::in, "STATE_DTYPE", pool, "INITIAL_STATE,!INPLACE_STATE"},
      {"o", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
      {"final_state", Access::out, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"}, "FINAL_STATE"},
      {"state", Access::inout, "STATE_DTYPE", pool, "INPLACE_STATE"},
  };
  t.constants = {"DTYPE",
                 "BETA_DTYPE",
                 "G_DTYPE",
                 "STATE_DTYPE",
                 "SEQLENS_DTYPE",
                 "INDEX_DTYPE",
                 "H",
                 "HV",
                 "K",
                 "V",
                 "GATE_K",
                 "VARLEN",
                 "GATED",
                 "SCALAR_GATE",
                 "VECTOR_GATE",
                 "GATE_IN_KERNEL",
                 "HAS_A_LOG",
                 "HAS_DT_BIAS",
                 "LOWER_BOUND",
                 "QK_L2NORM",
                 "BETA_SIGMOID",
                 "NEG_EIGVAL",
                 "INITIAL_STATE",
                 "FINAL_STATE",
                 "STATE_V_FIRST",
                 "INPLACE_STATE",
                 "STATE_INDEX"};
  return t;
}

std::int64_t power_of_two(std::int64_t n) {
  std::int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

/// Elements of the largest access of up to 16 bytes that divides `count` elements.
std::int64_t vector_elements(std::int64_t count, DType type) {
  const auto size = static_cast<std::int64_t>(size_of(type));
  std::int64_t bytes = 16;
  while (count * size % bytes != 0) bytes /= 2;
  return bytes / size;
}

/// How many keys and value columns a lane holds, as recurrent/portable.cu shares them out; none
/// where so many columns a warp do not go round.
struct Share {
  std::int64_t keys = 0, values = 0;
};
Share share(const Values& constants, std::int64_t columns) {
  const std::int64_t K = constants.integer("K"), V = constants.integer("V");
  const bool v_first = constants.flag("STATE_V_FIRST");
  const std::int64_t vector = vector_elements(v_first ? K : V, constants.dtype("STATE_DTYPE"));
  if (v_first) {
    const std::int64_t key_lanes = std::min<std::int64_t>(power_of_two(K / vector), 16);
    return {cuda::ceil_div(K / vector, key_lanes) * vector, columns * key_lanes / 32};
  }
  if (columns < vector || columns > 32 * vector) return {};
  const std::int64_t key_lanes = 32 * vector / columns;
  const std::int64_t keys = cuda::ceil_div(K, key_lanes);
  const std::int64_t run =
      std::min(vector_elements(K, constants.dtype("DTYPE")), power_of_two(keys));
  return {cuda::round_up(keys, run), vector};
}

std::string illegal(const Values& constants, const Config& config, const Limits&) {
  const std::int64_t BV = config.integer("BV"), warps = config.integer("num_warps");
  if (BV >= 2 * constants.integer("V") && BV > 8)
    return fmt::format("BV={} is too wide for V={}", BV, constants.integer("V"));
  const Share lane = share(constants, BV / warps);
  if (BV % warps != 0 || lane.keys == 0 || lane.values == 0)
    return fmt::format("BV={} does not go round among {} warps", BV, warps);
  // Beside the state a lane holds k, q and the decay of its keys.
  if (lane.keys * (lane.values + 3) > 136)
    return fmt::format("BV={} and num_warps={} keep too much of the state in each thread", BV,
                       warps);
  return {};
}

/// CUDA, sm_80 and up: one block BV value columns of a sequence and value head.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BV", cuda::integers({32, 64, 16, 8, 128})},
                {"num_warps", cuda::integers({4, 2, 1, 8})}};
  t.source = "recurrent/portable.cu";
  t.illegal = illegal;
  // A warp moves 64 bytes of each row where its registers hold so much of the state, else 32, the
  // least that memory moves (one H200, 2026-11-21, 128 sequences, fp32 states of 128 x 128: 0.137
  // ms and 0.155). Of states with rows of K it has whole rows.
  t.fallback = [](const Values& constants, const Limits& limits, std::int64_t) {
    const auto size = static_cast<std::int64_t>(size_of(constants.dtype("STATE_DTYPE")));
    const Config wide{{"BV", 32}, {"num_warps", 2}};
    if (size == 4 && !constants.flag("STATE_V_FIRST") && constants.integer("V") > 32 &&
        illegal(constants, wide, limits).empty())
      return wide;
    const std::int64_t warps = constants.integer("V") > 32 / size * 2 ? 4 : 1;
    return Config{{"BV", warps * (32 / size)}, {"num_warps", warps}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = cuda::ceil_div(constants.integer("V"), config.integer("BV"));
    return cuda::launch(e.N * constants.integer("HV") * tiles, config, 0);
  };
  return t;
}

/// Scratch of one block, as recurrent/cpu.cpp hands it out: the state, and a token's vectors.
std::int64_t cpu_scratch(const Values& constants, const Config& config) {
  const std::int64_t BV = config.integer("BV"), K = constants.integer("K");
  return fp32_bytes(
      (constants.flag("STATE_V_FIRST") ? scratch::tile(BV, K) : scratch::tile(K, BV)) +
      3 * scratch::vector(K) + 4 * scratch::vector(BV));
}

/// One call: all tokens of one sequence, one value head, BV columns of the state.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "recurrent/cpu.cpp";
  t.tunables = {{"BV", {128, 64}}};
  t.illegal = [](const Values& constants, const Config& config, const Limits& limits) {
    const std::string problem =
        column_block_problem("BV", config.integer("BV"), constants.integer("V"));
    return problem.empty() ? scratch_problem(cpu_scratch(constants, config), limits) : problem;
  };
  t.fallback = [](const Values& constants, const Limits&, std::int64_t) {
    return Config{{"BV", column_block(constants.integer("V"), 128)}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t BV = config.integer("BV");
    return Geometry{.grid = {(constants.integer("V") + BV - 1) / BV, constants.integer("HV"), e.N},
                    .shared_bytes = cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::recurrent
