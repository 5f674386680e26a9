// The plan that a tuning chooses, with known costs, measured on a device whose clocks drift.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>

#include "autotune/clock_track.hpp"
#include "autotune/contest.hpp"
#include "autotune/loop.hpp"
#include "autotune/synthetic_laboratory.hpp"
#include "autotune/synthetic_space.hpp"

namespace wyvern {
namespace {

LoopLimits unlimited() {
  LoopLimits limits;
  limits.elapsed_s = [] { return 0.0; };
  limits.deadline_s = 1;
  return limits;
}

/// One template with `count` configs.
SearchSpace single_space(std::int64_t count) {
  SearchSpace space;
  space.uses = 1;
  Group group{"a", {}, 64, 0, {}, 0, {0}, 0, {}};
  for (std::int64_t x = 0; x < count; ++x)
    group.configs.push_back({{"BT", std::int64_t{64}}, {"x", x}});
  space.layers.push_back({64, 0, {{0, 1, 0}}});
  space.default_plan.push_back({"a", group.configs.front()});
  space.groups.push_back(std::move(group));
  return space;
}

/// The whole way from nothing to a winner.
Plan tuned(const SearchSpace& space, SyntheticLaboratory& laboratory, bool exhaustive,
           const Plan& incumbent = {}) {
  Results results(space);
  run_search(space, Search(space, exhaustive), laboratory, unlimited(), results);
  Contest contest(space, laboratory, results, incumbent);
  EXPECT_TRUE(contest.race(1));
  const auto winner = contest.decide(1, [](std::size_t) {});
  return winner ? contest.timings()[*winner].plan : Plan();
}

/// What medians of one pass alone would choose.
Plan fastest_alone(const SearchSpace& space, SyntheticLaboratory& laboratory) {
  Results results(space);
  run_search(space, Search(space, true), laboratory, unlimited(), results);
  std::size_t best = 0;
  for (std::size_t i = 1; i < space.groups[0].configs.size(); ++i)
    if (results.timing({0, i}).median < results.timing({0, best}).median) best = i;
  return {{"a", space.groups[0].configs[best]}};
}

/// A share of sorted values.
double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

// Twenty configs within fifteen percent, windows that drift by one percent: the winner is the same
// or within one percent of the other tuning's, and close to the best there is.
TEST(Contest, DriftChangesNoWinnerByMoreThanAPercent) {
  constexpr int kTunings = 200, kSpaces = 20;
  int same = 0, close = 0, close_alone = 0, pairs = 0;
  std::vector<double> regrets;
  const SearchSpace space = single_space(20);
  for (int world = 0; world < kSpaces; ++world) {
    std::mt19937_64 random(static_cast<std::uint64_t>(world) + 1);
    std::vector<double> costs(20);
    for (double& cost : costs) cost = std::uniform_real_distribution<double>(100, 115)(random);
    const Cost cost = [&](const Group&, const Config& config) {
      return costs[static_cast<std::size_t>(config.integer("x"))];
    };
    const double best = *std::min_element(costs.begin(), costs.end());
    double before = 0, before_alone = 0;
    for (int i = 0; i < kTunings / kSpaces; ++i) {
      SyntheticLaboratory laboratory(space, cost, static_cast<std::uint64_t>(1000 * world + i));
      laboratory.drift = 0.01;
      laboratory.noise = 0.005;
      const double taken = laboratory.plan_cost(tuned(space, laboratory, true));
      SyntheticLaboratory once(space, cost, static_cast<std::uint64_t>(1000 * world + i));
      once.drift = laboratory.drift;
      once.noise = laboratory.noise;
      const double alone = once.plan_cost(fastest_alone(space, once));
      regrets.push_back(taken / best - 1);
      if (i > 0) {
        ++pairs;
        same += taken == before ? 1 : 0;
        close += std::fabs(taken / before - 1) <= 0.01 ? 1 : 0;
        close_alone += std::fabs(alone / before_alone - 1) <= 0.01 ? 1 : 0;
      }
      before = taken;
      before_alone = alone;
    }
  }
  const double mean =
      std::accumulate(regrets.begin(), regrets.end(), 0.0) / static_cast<double>(regrets.size());
  EXPECT_LT(close_alone, 0.95 * pairs) << "the drift decides nothing here";
  EXPECT_GE(close, 0.98 * pairs) << same << " the same, " << close << " within 1% of " << pairs;
  EXPECT_LE(mean, 0.01);
  EXPECT_LE(percentile(regrets, 0.95), 0.03);
}

// Alone, "b" is fastest with x = 1; beside the others x = 2 is, which ties with it alone.
TEST(Contest, NearTiesAreComparedInsideTheBestPlan) {
  const SearchSpace space = synthetic_space();
  const Cost alone = [](const Group& group, const Config& config) {
    if (group.BT == 32) return 1000.0;
    if (group.template_id == "bc") return 200.0;
    const auto x = config.integer("x"), y = config.integer("y");
    const double base = x == 1 ? 30 : x == 2 ? 30.3 : 40;
    return base + static_cast<double>(y);
  };
  class InContext final : public SyntheticLaboratory {
   public:
    using SyntheticLaboratory::SyntheticLaboratory;
    std::vector<PlanTiming> compare(std::span<const Plan> plans, double seconds) override {
      auto timings = SyntheticLaboratory::compare(plans, seconds);
      for (PlanTiming& timing : timings)
        for (const PlanStep& step : timing.plan)
          if (step.template_id == "b" && step.config.integer("x") == 2)
            for (double& sample : timing.samples) sample -= 5;
      return timings;
    }
  };
  InContext laboratory(space, alone);
  const Plan plan = tuned(space, laboratory, true);
  ASSERT_EQ(plan.size(), 3U);
  EXPECT_EQ(plan[1].config.integer("x"), 2) << canonical_text(plan);
  EXPECT_EQ(plan[0].config.integer("x"), 1) << canonical_text(plan);
}

TEST(Contest, TheBestConfigOfEachStepMakesAPlan) {
  const SearchSpace space = synthetic_space();
  const Cost alone = [](const Group& group, const Config& config) {
    if (group.BT == 32) return 1000.0;
    if (group.template_id == "bc") return 200.0;
    return 30 + 0.1 * static_cast<double>(config.integer("y")) +
           10.0 * static_cast<double>(config.integer("x") != 1 ? 1 : 0);
  };
  class InContext final : public SyntheticLaboratory {
   public:
    using SyntheticLaboratory::SyntheticLaboratory;
    std::vector<PlanTiming> compare(std::span<const Plan> plans, double seconds) override {
      auto timings = SyntheticLaboratory::compare(plans, seconds);
      for (PlanTiming& timing : timings)
        for (const PlanStep& step : timing.plan)
          for (double& sample : timing.samples) sample -= step.config.integer("y") == 2 ? 4 : 0;
      return timings;
    }
  };
  InContext laboratory(space, alone);
  for (const PlanStep& step : tuned(space, laboratory, true))
    EXPECT_EQ(step.config.integer("y"), 2) << step.template_id;
}

TEST(Contest, TheIncumbentStaysWhereNothingBeatsIt) {
  const SearchSpace space = single_space(8);
  const Cost cost = [](const Group&, const Config& config) {
    return config.integer("x") == 0 ? 120.0
                                    : 100.0 + 0.01 * static_cast<double>(config.integer("x"));
  };
  for (const std::size_t x : {std::size_t{3}, std::size_t{6}}) {
    SyntheticLaboratory laboratory(space, cost, x);
    laboratory.drift = 0.01;
    laboratory.noise = 0.002;
    const Plan incumbent{{"a", space.groups[0].configs[x]}};
    EXPECT_EQ(tuned(space, laboratory, true, incumbent), incumbent);
  }
}

TEST(Contest, TheDefaultWinsWhereNothingBeatsIt) {
  const SearchSpace space = single_space(20);
  const Cost cost = [](const Group&, const Config& config) {
    return config.integer("x") == 0 ? 100.0 : 99.7;
  };
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SyntheticLaboratory laboratory(space, cost, seed);
    laboratory.drift = 0.01;
    laboratory.noise = 0.01;
    EXPECT_EQ(tuned(space, laboratory, true), space.default_plan);
  }
}

TEST(SteadyWindow, IsMeasuredAgainWhileTheSpeedChanges) {
  std::vector<double> paces{100, 97, 97.1, 90};
  std::size_t at = 0;
  int windows = 0;
  const auto pace = [&] { return Timing{paces.at(at++), 0, 0}; };
  const auto take = [&] { ++windows; };
  EXPECT_EQ(steady_window(take, pace), 1U);
  EXPECT_EQ(windows, 2);
  // Where it never is steady, the window that changed least counts.
  paces = {100, 90, 88, 80};
  at = 0;
  windows = 0;
  EXPECT_EQ(steady_window(take, pace), 1U);
  EXPECT_EQ(windows, 3);
  // Without a clock the device's speed is assumed to be steady.
  windows = 0;
  EXPECT_EQ(steady_window(take, [] { return Timing{}; }), 0U);
  EXPECT_EQ(windows, 1);
}

TEST(LongRunChange, IsOfTheTrendAndNotOfTheNoise) {
  std::mt19937_64 random(3);
  std::vector<double> level, rising;
  for (int i = 0; i < 200; ++i) {
    const double noise = std::uniform_real_distribution<double>(0.98, 1.02)(random);
    const double hiccup = i % 11 == 0 ? 10 : 1;
    level.push_back(50 * noise * hiccup);
    rising.push_back(50 * noise * hiccup * (1 + 0.001 * i));
  }
  EXPECT_LT(long_run_change(level), 0.03);
  EXPECT_NEAR(long_run_change(rising), 0.2, 0.03);
  EXPECT_EQ(long_run_change(std::span(rising).first(15)), 0);
}

TEST(ClockTrack, AsksAsOftenAsThatCostsLittle) {
  double now = 0, cost = 0.001;
  int asked = 0;
  const auto read = [&] {
    now += cost;
    return 1700.0 + ++asked;
  };
  ClockTrack clock(read, [&] { return now; });
  EXPECT_EQ(asked, 1);  // what the first answer costs says nothing of the others
  const int samples = 10000;
  for (int i = 0; i < samples; ++i) {
    clock.mhz();
    now += 0.0001;
  }
  EXPECT_LE(asked * cost, 0.05 * now + 2 * cost);
  EXPECT_GE(asked * cost, 0.045 * now);
  cost = 0;
  now += 1;
  const int before = asked;
  EXPECT_EQ(clock.mhz(), 1700.0 + before + 1);
  EXPECT_EQ(clock.mhz(), 1700.0 + before + 2);  // what costs nothing is asked at each sample
}

TEST(ClockTrack, IsSilentWhereTheDeviceIs) {
  int asked = 0;
  const auto read = [&] { return ++asked < 3 ? 1700.0 : 0.0; };
  ClockTrack clock(read, [] { return 0.0; });
  EXPECT_EQ(clock.mhz(), 1700);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(clock.mhz(), 0);
  EXPECT_EQ(asked, 3);
}

TEST(Repeats, AreTheSameForMediansALittleApart) {
  EXPECT_EQ(repeats_for(49), 2);
  EXPECT_EQ(repeats_for(51), 1);
  EXPECT_EQ(repeats_for(30), 2);
  EXPECT_EQ(repeats_for(1), 32);
  EXPECT_EQ(repeats_for(0), 32);
  EXPECT_EQ(repeats_for(10), repeats_for(11));
}

}  // namespace
}  // namespace wyvern
