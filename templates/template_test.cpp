#include "templates/template.hpp"

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include "templates/cuda_contract.hpp"
#include "templates/gate/stages.hpp"
#include "templates/intra/stages.hpp"
#include "templates/legality.hpp"
#include "templates/rows/stages.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern {
namespace {

/// A template that covers these stages and is sound beside what a test changes.
Template covering(std::vector<Cover> covers) {
  Template t;
  t.name = "made";
  t.variant = "portable";
  t.covers = std::move(covers);
  t.constants.assign(all_constants().begin(), all_constants().end());
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [](const Spec&, const Extents&, const Limits&) { return Geometry{}; };
  return t;
}

std::string names_of(const Template& t) {
  std::string names;
  for (const Parameter& p : t.parameters) names += std::string(p.name) + ' ';
  return names;
}

std::string refusal(Template t) {
  try {
    register_template(t);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

void expect_has(const std::string& text, std::string_view piece) {
  EXPECT_NE(text.find(piece), std::string::npos) << "'" << piece << "' is not in: " << text;
}

TEST(Registration, OneStageKeepsItsSignature) {
  Template t = covering({stages::scaled_dot_kkt});
  register_template(t);
  EXPECT_EQ(names_of(t), "k beta G k_rstd seq_offsets chunk_index A ");
  EXPECT_EQ(t.summary, stages::scaled_dot_kkt.summary);
}

TEST(Registration, TensorsBetweenCoveredStagesAreNoParameters) {
  Template t = covering({stages::scaled_dot_kkt, stages::solve_tril, stages::recompute_w_u});
  register_template(t);
  EXPECT_EQ(names_of(t), "k beta G k_rstd v seq_offsets chunk_index w u ");
}

TEST(Registration, KeptTensorsAreWrittenWhereTheFlagsSaySo) {
  Template t = covering({stages::scaled_dot_kkt, stages::solve_tril, stages::recompute_w_u});
  t.keeps = {{"Tinv", {constant::KEEP_INVERSE}}};
  register_template(t);
  EXPECT_EQ(names_of(t), "k beta G k_rstd v seq_offsets chunk_index Tinv w u ");
  Constants c;
  const Parameter& Tinv = t.parameters[7];
  ASSERT_EQ(Tinv.name, "Tinv");
  EXPECT_FALSE(is_present(Tinv, c));
  c.KEEP_INVERSE = true;
  EXPECT_TRUE(is_present(Tinv, c));
}

TEST(Registration, ARenamedOutputIsTheNextStagesInput) {
  Template t = covering({{stages::gate, {{"g_log", "g"}}}, stages::chunk_local_cumsum});
  register_template(t);
  EXPECT_EQ(names_of(t), "g A_log dt_bias seq_offsets chunk_index G ");
}

TEST(Registration, TensorsOfAnOptionalStageAreThereWithIt) {
  Cover norms(stages::l2norm_rstd, {{"x", "k"}, {"rstd", "k_rstd"}});
  norms.only_when = Presence{constant::QK_L2NORM};
  Cover gate(stages::gate, {{"g_log", "g"}});
  gate.only_when = Presence{constant::GATE_IN_KERNEL};
  Cover sums(stages::chunk_local_cumsum);
  sums.only_when = Presence{constant::GATED};
  Template t = covering({norms, gate, sums, stages::scaled_dot_kkt});
  register_template(t);
  EXPECT_EQ(names_of(t), "k g A_log dt_bias beta G seq_offsets chunk_index A ");
  const auto present = [&](std::string_view name, const Values& values) {
    for (const Parameter& p : t.parameters)
      if (p.name == name) return is_present(p, Constants{}.with(values));
    return false;
  };
  // k is read in any case, g by the gate or by the sums, A_log by the gate alone.
  EXPECT_TRUE(present("k", {}));
  EXPECT_FALSE(present("g", {}));
  EXPECT_TRUE(present("g", {{"GATED", true}}));
  EXPECT_TRUE(present("g", {{"GATED", true}, {"GATE_IN_KERNEL", true}}));
  EXPECT_FALSE(present("A_log", {{"GATED", true}}));
  EXPECT_TRUE(present("A_log", {{"GATED", true}, {"GATE_IN_KERNEL", true}}));
}

TEST(Registration, TensorsOfAStageThatIsDoneAreThoseOfOthers) {
  Template whole = covering({stages::fwd_h_segment, stages::fwd_h_combine, stages::fwd_h});
  register_template(whole);
  EXPECT_NE(names_of(whole).find("has_initial_state "), std::string::npos);
  EXPECT_EQ(names_of(whole).find("segment_"), std::string::npos);
  Template resumes = covering(whole.covers);
  resumes.covers[0].done = resumes.covers[1].done = true;
  register_template(resumes);
  Template last = covering({stages::fwd_h});
  register_template(last);
  EXPECT_EQ(names_of(resumes), names_of(last));
}

TEST(Presence, CombinesFlags) {
  const Presence norm{constant::QK_L2NORM};
  const Presence plain{!constant::QK_L2NORM};
  const Presence gated{constant::GATED};
  EXPECT_FALSE(norm.and_also(plain).has_value());
  EXPECT_EQ(norm.and_also(gated)->text(), "QK_L2NORM,GATED");
  EXPECT_EQ(norm.or_else(gated).text(), "QK_L2NORM or GATED");
  EXPECT_TRUE(norm.or_else({}).always());
  EXPECT_TRUE(norm.or_else(*norm.negated()).always());
  EXPECT_EQ(norm.negated(), plain);
  EXPECT_FALSE(Presence().negated().has_value());
  EXPECT_EQ(norm.or_else(gated).negated()->text(), "!QK_L2NORM,!GATED");
}

TEST(Registration, ScratchComesLast) {
  Template t = covering({stages::solve_tril});
  t.additional = {Argument{"counter", Access::scratch, DType::int32, {std::int64_t{1}}}};
  register_template(t);
  EXPECT_EQ(names_of(t), "A seq_offsets chunk_index Tinv counter ");
}

TEST(Registration, NamesThatNoStageHasAreRefused) {
  expect_has(refusal(covering({})), "covers no stage");
  expect_has(refusal(covering({{stages::gate, {{"g_lgo", "g"}}}})), "no tensor g_lgo");
  Template keeps = covering({stages::scaled_dot_kkt, stages::solve_tril});
  keeps.keeps = {{"W"}};
  expect_has(refusal(keeps), "it keeps W");
  Template twice = covering({stages::solve_tril});
  twice.additional = {tensor::A};
  expect_has(refusal(twice), "A is additional, but a covered stage has it");
}

TEST(Registration, AddsTheTypesAndFlagsOfParameters) {
  Template t = covering({stages::solve_tril});
  t.constants = {constant::HV, constant::VARLEN};
  register_template(t);
  std::vector<std::string_view> names;
  for (const AnyConstant& each : t.constants) names.push_back(name_of(each));
  EXPECT_EQ(names, (std::vector<std::string_view>{"HV", "VARLEN", "DTYPE"}));
}

TEST(Registration, TemplatesWithoutALaunchAreRefused) {
  Template launchless = covering({stages::solve_tril});
  launchless.geometry = nullptr;
  expect_has(refusal(launchless), "no launch");
}

/// scaled_dot_kkt with a map of k.
Template with_map() {
  Template t = covering({stages::scaled_dot_kkt});
  t.needs.tensor_copies = true;
  t.tensor_maps = {{.name = "k_map", .argument = "k", .view = [](const Spec&, const Extents&) {
                      return TiledView{};
                    }}};
  return t;
}

TEST(Registration, TensorMapsAreOfArgumentsThatAreThere) {
  Template t = with_map();
  register_template(t);
  EXPECT_EQ(t.parameters[t.tensor_maps.front().parameter].name, "k");
  Template needless = with_map();
  needless.needs.tensor_copies = false;
  expect_has(refusal(needless), "needs.tensor_copies must be true");
  const auto refused = [](auto change) {
    Template changed = with_map();
    change(changed.tensor_maps.front());
    return refusal(changed);
  };
  expect_has(refused([](TensorMapUse& map) { map.argument = "q"; }),
             "k_map is a map of q, which is not among its arguments");
  expect_has(refused([](TensorMapUse& map) { map.argument = "k_rstd"; }),
             "a map of k_rstd, which is present only with QK_L2NORM");
  expect_has(refused([](TensorMapUse& map) { map.name = "beta"; }),
             "two parameters are called beta");
  expect_has(refused([](TensorMapUse& map) { map.view = nullptr; }), "k_map has no view");
  Template sometimes = with_map();
  sometimes.tensor_maps.front().argument = "k_rstd";
  sometimes.tensor_maps.front().when = {constant::QK_L2NORM};
  register_template(sometimes);
  EXPECT_EQ(sometimes.parameters[sometimes.tensor_maps.front().parameter].name, "k_rstd");
  Template many = with_map();
  many.tensor_maps.resize(kMaxTensorMaps + 1, many.tensor_maps.front());
  expect_has(refusal(many), "it has 11 tensor maps; 10 is the most");
}

TEST(Registration, StridedTensorsHaveARowForEachToken) {
  const auto strided = [](std::vector<std::string_view> names) {
    Template t = covering({stages::scaled_dot_kkt});
    t.strided = std::move(names);
    return t;
  };
  Template t = strided({"beta", "k"});
  register_template(t);
  for (const Parameter& p : t.parameters)
    EXPECT_EQ(p.strided, p.name == "k" || p.name == "beta") << p.name;
  expect_has(refusal(strided({"q"})), "q is strided, but not among its arguments");
  expect_has(refusal(strided({"chunk_index"})),
             "chunk_index is strided, but has no row for each token and no slots");
  expect_has(
      refusal(strided(std::vector<std::string_view>(kMaxStrided + 1, "k"))),
      fmt::format("it has {} strided tensors; {} is the most", kMaxStrided + 1, kMaxStrided));
}

TEST(Registration, EveryTemplateOfTheBuildIsSound) {
  for (const Template& t : all_templates()) {
    EXPECT_EQ(find_template(t.id()), &t);
    EXPECT_FALSE(t.parameters.empty()) << t.id();
  }
  EXPECT_EQ(find_template("solve_tril"), nullptr);
  EXPECT_EQ(find_template("solve_tril.nobody"), nullptr);
}

TEST(Needs, ATargetThatLacksThemHasNoConfigs) {
  Template t = covering({stages::solve_tril});
  t.tunables = {{tunable::BT, {std::int64_t{64}, std::int64_t{32}}}};
  register_template(t);
  Limits limits;
  EXPECT_EQ(space(t, Constants{}, limits).size(), 2U);
  t.needs.wgmma = true;
  EXPECT_TRUE(space(t, Constants{}, limits).empty());
  EXPECT_FALSE(
      default_config(t, Constants{}, limits, Precision::tf32, {.shape = {64}}).has_value());
  expect_has(t.problem(Spec{}, limits), "wgmma");
  limits.wgmma = true;
  EXPECT_EQ(space(t, Constants{}, limits).size(), 2U);
  t.needs.clusters = true;
  expect_has(t.problem(Spec{}, limits), "clusters");
  limits.max_cluster = 8;
  EXPECT_EQ(t.problem(Spec{}, limits), "");
}

TEST(DefaultConfig, HasOneOfTheTemplatesValues) {
  Template t = covering({stages::solve_tril});
  t.tunables = {{tunable::BT, {std::int64_t{64}, std::int64_t{32}}},
                {tunable::BV, {std::int64_t{32}, std::int64_t{16}}}};
  t.fallback = [](Spec& s, const Limits&) { s.BV = s.BT / 2; };
  register_template(t);
  const auto BV = [&](PlanShape shape) -> std::int64_t {
    const auto config = default_config(t, Constants{}, Limits{}, Precision::tf32, {.shape = shape});
    return config ? config->integer("BV") : 0;
  };
  EXPECT_EQ(BV(64), 32);
  EXPECT_EQ(BV(32), 16);
  EXPECT_EQ(BV(0), 32);  // any: the first
  for (const std::int64_t BT : {-1, 16, 48, 128}) EXPECT_EQ(BV(BT), 0) << BT;
  // What fallback() sets is no exception.
  t.fallback = [](Spec& s, const Limits&) { s.BV = 8; };
  EXPECT_EQ(BV(64), 32);
  // With a cost the cheapest, of equal ones the first.
  t.cost = [](const Spec& s, const Workload&, const Limits&) { return static_cast<double>(s.BV); };
  EXPECT_EQ(BV(64), 16);
  t.cost = [](const Spec&, const Workload&, const Limits&) { return 1.0; };
  EXPECT_EQ(BV(64), 32);
}

TEST(ConfigProblem, AsksTheContractOnlyAboutValuesThatTunablesHave) {
  Template t = covering({stages::solve_tril});
  t.tunables = {{tunable::BT, {std::int64_t{64}, std::int64_t{32}}},
                {tunable::precision, {Precision::tf32x3, Precision::tf32}}};
  int asked = 0;
  t.illegal = [&](const Spec& s, const Limits&) {
    ++asked;
    return s.BT == 32 ? std::string("32 is too few") : std::string();
  };
  register_template(t);
  const auto problem = [&](const Config& config, Precision floor = Precision::tf32) {
    return config_problem(t, config, Constants{}, Limits{}, floor);
  };
  const auto with = [](Value BT, Value precision) {
    return Config{{"BT", BT}, {"precision", precision}};
  };
  EXPECT_EQ(problem(with(64, Precision::tf32)), "");
  EXPECT_EQ(problem(with(32, Precision::tf32)), "32 is too few");
  asked = 0;
  expect_has(problem({}), "no BT");
  expect_has(problem({{"BT", 64}}), "no precision");
  expect_has(problem(with(0, Precision::tf32)), "BT is 0; it must be one of 64, 32");
  expect_has(problem(with(true, Precision::tf32)), "BT is true;");
  expect_has(problem(with(64, Precision::ieee)), "precision is ieee;");
  expect_has(problem(with(64, 1)), "precision is 1;");
  expect_has(problem(with(64, Precision::tf32), Precision::tf32x3), "at least tf32x3");
  Config more = with(64, Precision::tf32);
  more.set("BK", std::int64_t{64});
  expect_has(problem(more), "'BK' is not one");
  EXPECT_EQ(asked, 0);
}

/// A grid has at most 65535 of its last two figures; as few rows more than are asked for as it can.
TEST(Launch, OfRowsFitsAGrid) {
  Spec s;
  s.num_warps = 4;
  for (const std::int64_t rows : {0, 1, 65535, 65536, 131071, 1000003}) {
    const Geometry g = cuda::launch_rows(rows, 12, s, 0);
    EXPECT_EQ(is_empty(g), rows == 0);
    EXPECT_EQ(g.grid[0], 12);
    EXPECT_LE(g.grid[1], 65535);
    EXPECT_GE(g.grid[1] * g.grid[2], rows);
    EXPECT_LT(g.grid[1] * g.grid[2], rows + std::max<std::int64_t>(g.grid[2], 1)) << rows;
  }
}

TEST(Constants, AreSetAndReadByName) {
  const Constants c = Constants{}.with({{"K", std::int64_t{60}}, {"DTYPE", DType::bf16}});
  EXPECT_EQ(c.K, 60);
  EXPECT_EQ(c.DTYPE, DType::bf16);
  EXPECT_EQ(c.values().integer("K"), 60);
  EXPECT_EQ(c.values().items().size(), all_constants().size());
  EXPECT_THROW((void)Constants{}.with({{"KK", std::int64_t{1}}}), Error);
  EXPECT_THROW((void)Constants{}.with({{"K", true}}), Error);
}

TEST(Spec, TakesTunablesByName) {
  const Spec s(Constants{}, Config{{"BT", std::int64_t{64}}, {"precision", Precision::tf32x3}});
  EXPECT_EQ(s.BT, 64);
  EXPECT_EQ(s.BK, 0);
  EXPECT_EQ(s.precision, Precision::tf32x3);
}

}  // namespace
}  // namespace wyvern
