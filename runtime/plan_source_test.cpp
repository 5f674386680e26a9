#include "runtime/plan_source.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cache/cache_testing.hpp"
#include "cache/rows.hpp"
#include "compiler/compiler.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

using testing::TempDirectory;

constexpr const char* kUnknown = R"([{"template": "fwd_h.abacus", "config": "BT=64"}])";

/// A plan that is known again by its BT.
std::string plan_named(int BT) {
  return R"([{"template": "fwd_h.portable", "config": "BT=)" + std::to_string(BT) + "\"}]";
}

Problem prefill(std::int64_t T = 8192) {
  Problem problem;
  problem.T = T;
  problem.H = 8, problem.HV = 32;
  return problem;
}
Problem continued_prefill(std::int64_t T = 8192) {
  Problem problem = prefill(T);
  problem.initial_state = problem.output_final_state = true;
  return problem;
}

class PlanSourceTest : public ::testing::Test {
 protected:
  PlanSourceTest() {
    device_.key = "H200";
    device_.driver = "580";
  }

  WinnerRow row(const Problem& problem, std::string plan, double ratio = 0.5) const {
    const ProblemKey key = problem_key(problem);
    WinnerRow row;
    row.device = device_.key;
    row.driver = device_.driver;
    row.family = key.family;
    row.tokens = key.tokens, row.sequences = key.sequences;
    row.plan = std::move(plan);
    row.median_us = 100 * ratio;
    row.default_us = 100;
    return row;
  }
  void store(const WinnerRow& row) { ASSERT_TRUE(cache_->store_winner(row)); }
  /// A layer of packs with these rows behind the ones before.
  void pack(const std::vector<WinnerRow>& rows) {
    const auto file = directory_.path() / ("pack" + std::to_string(layers_.size()) + ".jsonl");
    std::string text =
        R"({"devices":[")" + rows.front().device + "\"],\"row\":\"pack\",\"version\":1}\n";
    for (const WinnerRow& one : rows) text += to_line(one) + '\n';
    testing::write_file(file, text);
    layers_.push_back({"layer" + std::to_string(layers_.size()), {file}});
    packs_ = std::make_shared<Packs>(layers_);
  }

  PlanChoice find(const Problem& problem, const PlanCheck& check = nullptr) {
    return CachePlanSource(cache_, packs_)
        .find(device_, problem_key(problem), check)
        .value_or(PlanChoice());
  }
  /// The BT of the plan that answers; 0: the default plan answers.
  std::int64_t answer(const Problem& problem, const PlanCheck& check = nullptr) {
    const PlanChoice choice = find(problem, check);
    return choice.plan.empty() ? 0 : choice.plan.front().config.integer("BT");
  }
  std::vector<Contender> contenders(const Problem& problem, const PlanCheck& check = nullptr) {
    return CachePlanSource(cache_, packs_).contenders(device_, problem_key(problem), check);
  }

  TempDirectory directory_;
  DeviceInfo device_;
  std::shared_ptr<Cache> cache_ = std::make_shared<Cache>(directory_.path());
  std::vector<PackLayer> layers_;
  std::shared_ptr<Packs> packs_ = std::make_shared<Packs>(layers_);
};

// ---- From exact to nearest

TEST_F(PlanSourceTest, AFirstPrefillIsServedByAContinuedOne) {
  store(row(continued_prefill(), plan_named(32)));
  Problem first = prefill();
  first.output_final_state = true;
  const PlanChoice choice = find(first);
  EXPECT_EQ(choice.origin, Origin::nearest);
  EXPECT_EQ(choice.plan, *plan_from_json(plan_named(32)));
  EXPECT_TRUE(choice.passed_over.empty());
  EXPECT_EQ(answer(prefill()), 32);
  const auto all = contenders(first);
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(all[0].kinship, Kinship::kernels);
  EXPECT_DOUBLE_EQ(all[0].distance, 0.25);
  EXPECT_TRUE(all[0].answers);
}

TEST_F(PlanSourceTest, SoItIsFromAPack) {
  pack({row(continued_prefill(), plan_named(32))});
  Problem first = prefill();
  first.output_final_state = true;
  EXPECT_EQ(answer(first), 32);
  EXPECT_EQ(find(first).origin, Origin::nearest);
}

TEST_F(PlanSourceTest, WithoutACachePacksAloneAnswer) {
  store(row(prefill(), plan_named(16)));
  EXPECT_EQ(answer(prefill()), 16);
  cache_ = nullptr;
  EXPECT_EQ(answer(prefill()), 0);
  pack({row(prefill(), plan_named(32))});
  EXPECT_EQ(answer(prefill()), 32);
  EXPECT_EQ(find(prefill()).origin, Origin::exact);
}

/// A plan of an H200 serves an H100 where it gained more than that counts.
TEST_F(PlanSourceTest, PacksOfAnotherGpuOfTheArchitectureAnswer) {
  device_.key = "NVIDIA H200, 132 SMs";
  pack({row(prefill(), plan_named(32), 0.9), row(continued_prefill(), plan_named(64), 0.975)});
  EXPECT_EQ(find(prefill()).origin, Origin::exact);
  device_.key = "NVIDIA H100 80GB HBM3, 132 SMs";
  EXPECT_EQ(answer(prefill()), 32);
  EXPECT_EQ(find(prefill()).origin, Origin::nearest);
  ASSERT_EQ(contenders(prefill()).size(), 1U);
  EXPECT_DOUBLE_EQ(contenders(prefill())[0].distance, 0.5);
  device_.key = "NVIDIA B200, 148 SMs";
  EXPECT_EQ(answer(prefill()), 0);
}

TEST_F(PlanSourceTest, OptionsAreCrossedInTheStatedOrder) {
  Problem wanted = prefill();
  EXPECT_TRUE(contenders(wanted).empty());
  // From the farthest to the nearest: each new one answers from then on.
  int BT = 0;
  const auto next = [&](const WinnerRow& row) {
    store(row);
    return answer(wanted) == BT;
  };
  const auto with = [&](const std::function<void(Problem&)>& change) {
    Problem problem = prefill();
    change(problem);
    return row(problem, plan_named(++BT));
  };
  EXPECT_TRUE(next(with([](Problem& p) { p.packed = true, p.H = 4, p.HV = 16; })));
  EXPECT_TRUE(next(with([](Problem& p) { p.packed = true; })));
  EXPECT_TRUE(next(with([](Problem& p) { p.beta_dtype = DType::fp32; })));
  EXPECT_TRUE(next(with([](Problem& p) { p.initial_state = true; })));
  EXPECT_TRUE(next(with([](Problem& p) {
    p.B = p.N = 2, p.H = 4, p.HV = 16;
    p.T = 8192;
  })));
  EXPECT_TRUE(next(with([](Problem& p) { p.T = 1 << 20; })));  // its own family
  EXPECT_EQ(find(wanted).origin, Origin::nearest);
  EXPECT_TRUE(next(with([](Problem& p) { p.T = 16384; })));
  EXPECT_TRUE(next(with([](Problem& p) { p.T = 8192; })));
  EXPECT_EQ(find(wanted).origin, Origin::exact);
  // With another driver it answers and is no longer exact.
  device_.driver = "590";
  EXPECT_EQ(answer(wanted), BT);
  EXPECT_EQ(find(wanted).origin, Origin::nearest);
}

TEST_F(PlanSourceTest, OfEqualDistancesTheEarlierLayerThenTheGreaterGainAnswers) {
  Problem initial = prefill(), final = prefill();
  initial.initial_state = final.output_final_state = true;
  pack({row(initial, plan_named(16), 0.1)});
  pack({row(prefill(4096), plan_named(32), 0.9), row(initial, plan_named(64), 0.05)});
  EXPECT_EQ(answer(prefill()), 32);
  EXPECT_EQ(answer(prefill(),
                   [](const Plan& plan) {
                     return plan.front().config.integer("BT") == 32 ? "it is wrong" : "";
                   }),
            16);
  store(row(initial, plan_named(1), 0.8));
  store(row(final, plan_named(2), 0.7));
  EXPECT_EQ(answer(prefill(),
                   [](const Plan& plan) {
                     return plan.front().config.integer("BT") == 32 ? "it is wrong" : "";
                   }),
            2);
}

TEST_F(PlanSourceTest, WhatGainedLittleIsNotCrossedTo) {
  store(row(continued_prefill(), plan_named(32), 0.98));
  EXPECT_EQ(answer(prefill()), 0);
  EXPECT_TRUE(contenders(prefill()).empty());
  // In its own family it answers however little it gained.
  EXPECT_EQ(answer(continued_prefill(4096)), 32);
}

TEST_F(PlanSourceTest, AnotherCountOfThreadsIsAsFarAsItsDoublings) {
  device_.key = "EPYC, native, 8 threads";
  store(row(prefill(), plan_named(32)));
  device_.key = "EPYC, native, 4 threads";
  EXPECT_EQ(answer(prefill()), 32);
  EXPECT_EQ(find(prefill()).origin, Origin::nearest);
  EXPECT_DOUBLE_EQ(contenders(prefill()).at(0).distance, 1);
  pack({row(prefill(), plan_named(64))});
  EXPECT_EQ(answer(prefill()), 64);
  EXPECT_EQ(find(prefill()).origin, Origin::exact);
  device_.key = "EPYC, native, 2 threads";
  EXPECT_EQ(answer(prefill()), 64);
  device_.key = "Xeon, native, 4 threads";
  EXPECT_EQ(answer(prefill()), 0);
  // As this machine's processor is named.
  const std::string& own = Device::open("cpu").info().key;
  EXPECT_EQ(device_parts(own).threads, Device::open("cpu").info().units) << own;
}

TEST_F(PlanSourceTest, ALaterTuningCountsAtOnce) {
  CachePlanSource source(cache_, packs_);
  const ProblemKey key = problem_key(prefill());
  EXPECT_FALSE(source.find(device_, key, nullptr));
  store(row(continued_prefill(), plan_named(32)));
  EXPECT_EQ(source.find(device_, key, nullptr)->origin, Origin::nearest);
  store(row(prefill(), plan_named(64)));
  EXPECT_EQ(source.find(device_, key, nullptr)->origin, Origin::exact);
}

TEST_F(PlanSourceTest, TriesNoMorePlansThanItSays) {
  for (int BT = 1; BT <= 2 * static_cast<int>(CachePlanSource::kMostTried); ++BT) {
    store(row(prefill(), plan_named(BT)));
    store(row(prefill(std::int64_t{1} << (BT % 16)), plan_named(BT)));  // the same plan again
  }
  std::size_t asked = 0;
  const PlanChoice choice = find(prefill(), [&](const Plan&) {
    ++asked;
    return "it is wrong";
  });
  EXPECT_EQ(asked, CachePlanSource::kMostTried);
  EXPECT_EQ(choice.origin, Origin::fallback);
  EXPECT_NE(choice.passed_over.find("it is wrong"), std::string::npos);
}

// ---- Winners of other builds

TEST_F(PlanSourceTest, AWinnerOfUnknownTemplatesHidesNoOther) {
  store(row(prefill(), plan_named(32)));
  store(row(prefill(), kUnknown));  // a newer build tuned the same problem again
  const PlanChoice choice = find(prefill());
  EXPECT_EQ(choice.origin, Origin::exact);
  EXPECT_EQ(choice.plan, *plan_from_json(plan_named(32)));
  EXPECT_NE(choice.passed_over.find("names templates that this build does not have"),
            std::string::npos)
      << choice.passed_over;
  const auto all = contenders(prefill());
  ASSERT_EQ(all.size(), 2U);
  EXPECT_FALSE(all[0].problem.empty());
  EXPECT_FALSE(all[0].answers);
  EXPECT_TRUE(all[1].answers);
}

TEST_F(PlanSourceTest, SoInAPack) {
  pack({row(prefill(), kUnknown, 0.1), row(prefill(), plan_named(32), 0.5)});
  EXPECT_EQ(answer(prefill()), 32);
  EXPECT_EQ(find(prefill()).origin, Origin::exact);
}

TEST_F(PlanSourceTest, ANearWinnerOfUnknownTemplatesHidesNoOther) {
  store(row(prefill(4096), plan_named(32)));
  store(row(prefill(4096), kUnknown));
  const PlanChoice choice = find(prefill());
  EXPECT_EQ(choice.origin, Origin::nearest);
  EXPECT_EQ(choice.plan, *plan_from_json(plan_named(32)));
  EXPECT_TRUE(choice.passed_over.empty()) << "another neighbour serves";
}

/// Two builds share a cache: this one, and a newer one whose tuning came last.
class TwoBuilds : public PlanSourceTest {
 protected:
  TwoBuilds() { device_ = cpu_.info(); }

  void SetUp() override {
    if (const std::string problem = compiler_problem(DeviceKind::cpu); !problem.empty())
      GTEST_SKIP() << problem;
  }

  static Problem decode() {
    Problem p;
    p.op = "delta_rule";
    p.pass = Pass::recurrent;
    p.T = 1, p.K = 16, p.V = 16;
    return p;
  }
  static Problem chunked() {
    Problem p;
    p.op = "delta_rule";
    p.T = 64, p.K = p.V = 16;
    p.dtype = p.beta_dtype = DType::fp32;
    return p;
  }
  const Target& target() const { return cpu_.impl().target(); }
  std::string problem_of(const Problem& problem, const Plan& plan) const {
    return plan_problem(problem, plan, target());
  }
  /// Plans with values that their templates' tunables have, and yet illegal.
  std::vector<Plan> illegal_plans(const Problem& problem) const {
    const Plan plan = default_plan(problem, target());
    std::vector<Plan> found;
    for (std::size_t i = 0; i < plan.size(); ++i)
      for (const Tunable& tunable : find_template(plan[i].template_id)->tunables)
        for (const Value& value : tunable.values) {
          Plan other = plan;
          other[i].config.set(tunable.name, value);
          if (!problem_of(problem, other).empty()) found.push_back(other);
        }
    return found;
  }
  Runtime runtime_that_tells(std::vector<std::string>& said) const {
    RuntimeOptions options;
    options.cache = cache_;
    options.plans = std::make_shared<CachePlanSource>(cache_, packs_);
    options.on_degraded = [&](const std::string& sentence) { said.push_back(sentence); };
    return Runtime(options);
  }
  /// What this build makes of its own winner below the other build's.
  void expect_passed_over(const Problem& problem, const std::string& theirs,
                          std::string_view reason) {
    SCOPED_TRACE(theirs);
    const Plan ours = default_plan(problem, target());
    store(row(problem, plan_to_json(ours)));
    store(row(problem, theirs, 0.1));
    const PlanChoice choice =
        find(problem, [&](const Plan& plan) { return problem_of(problem, plan); });
    EXPECT_EQ(choice.origin, Origin::exact);
    EXPECT_EQ(choice.plan, ours);
    EXPECT_NE(choice.passed_over.find(reason), std::string::npos) << choice.passed_over;
    ASSERT_TRUE(cache_->clear());
  }

  Device cpu_ = Device::open("cpu");
};

TEST_F(TwoBuilds, DifferInTemplates) {
  expect_passed_over(decode(), kUnknown, "templates that this build does not have");
  // A template that this build has, for other stages.
  expect_passed_over(decode(), plan_to_json(default_plan(chunked(), target())),
                     "does not carry out the next stage");
}

TEST_F(TwoBuilds, DifferInContracts) {
  const std::vector<Plan> illegal = illegal_plans(chunked());
  ASSERT_FALSE(illegal.empty());
  for (const Plan& theirs : illegal)
    expect_passed_over(chunked(), plan_to_json(theirs), "cannot be used (");
}

TEST_F(TwoBuilds, DifferInTheMeaningOfAConfig) {
  const Plan plan = default_plan(decode(), target());
  ASSERT_FALSE(plan.front().config.empty());
  const std::string name = plan.front().config.items().begin()->first;
  Plan another_value = plan, another_tunable = plan, fewer = plan;
  another_value.front().config.set(name, std::int64_t{7777});  // it counts something else there
  another_tunable.front().config.set("unrolled_by", std::int64_t{4});
  fewer.front().config = Config();
  expect_passed_over(decode(), plan_to_json(another_value), name);
  expect_passed_over(decode(), plan_to_json(another_tunable), "unrolled_by");
  expect_passed_over(decode(), plan_to_json(fewer), name);
}

TEST_F(TwoBuilds, WhatIsPassedOverIsSaidOnce) {
  std::vector<std::string> said;
  Runtime runtime = runtime_that_tells(said);
  store(row(decode(), plan_to_json(default_plan(decode(), target()))));
  store(row(decode(), kUnknown));
  for (const std::int64_t B : {1, 1, 2, 4}) {
    Problem problem = decode();
    problem.B = problem.N = B;
    store(row(problem, kUnknown, 0.1));
    EXPECT_EQ(runtime.prepare(cpu_, problem).origin(), B == 1 ? Origin::exact : Origin::nearest);
  }
  ASSERT_EQ(said.size(), 1U) << said[1];
  EXPECT_NE(said[0].find("so another tuned plan takes its place"), std::string::npos) << said[0];
}

TEST_F(TwoBuilds, ANeighbourThatCannotServeIsSaidOnce) {
  std::vector<std::string> said;
  Runtime runtime = runtime_that_tells(said);
  Problem neighbour = decode();
  neighbour.initial_state = true;
  store(row(neighbour, plan_to_json(default_plan(decode(), target()))));
  EXPECT_EQ(runtime.prepare(cpu_, decode()).origin(), Origin::nearest);
  EXPECT_TRUE(said.empty());
  ASSERT_TRUE(cache_->clear());
  store(row(neighbour, kUnknown));
  for (const std::int64_t B : {1, 1, 2}) {
    Problem problem = decode();
    problem.B = problem.N = B;
    EXPECT_EQ(runtime.prepare(cpu_, problem).origin(), Origin::fallback);
  }
  ASSERT_EQ(said.size(), 1U);
  EXPECT_NE(said[0].find("so the default plan takes its place"), std::string::npos) << said[0];
  EXPECT_NE(said[0].find("/initial_state"), std::string::npos) << said[0];
}

}  // namespace
}  // namespace wyvern
