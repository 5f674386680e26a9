// Searching and choosing on synthetic costs: no device, no clock.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <random>

#include "autotune/choose.hpp"
#include "autotune/loop.hpp"
#include "autotune/search.hpp"
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

/// Separable, least at x = 3, y = 1; template "bc" pays off with BT 32 only.
double smooth(const Group& group, const Config& config) {
  const std::map<std::string, double> base{{"a", 10}, {"b", 40}, {"c", 30}, {"bc", 75}};
  const auto x = static_cast<double>(config.integer("x"));
  const auto y = static_cast<double>(config.integer("y"));
  const double factor = 1 + 0.1 * (3 - x) + 0.05 * std::fabs(y - 1);
  const double fused = group.template_id == "bc" && group.BT == 32 ? 0.6 : 1.0;
  return base.at(group.template_id) * factor * fused;
}

/// The least sum over all covers and configs, by trying them all.
double exhaustive_best(const SearchSpace& space, const Cost& cost) {
  const auto least = [&](std::size_t group) {
    double best = INFINITY;
    for (const Config& config : space.groups[group].configs)
      best = std::min(best, cost(space.groups[group], config));
    return best;
  };
  double best = INFINITY;
  for (const std::size_t base : {0, 4})
    best =
        std::min(best, least(base) + std::min(least(base + 1) + least(base + 3), least(base + 2)));
  return best;
}

TEST(Search, LocalSearchFindsTheBestPlanOfASmoothSpace) {
  const SearchSpace space = synthetic_space();
  SyntheticLaboratory laboratory(space, smooth);
  Results results(space);
  const LoopEnd end = run_search(space, Search(space, false), laboratory, unlimited(), results);
  EXPECT_TRUE(end.complete);
  const auto plans = best_plans(space, results, 1);
  ASSERT_EQ(plans.size(), 1U);
  EXPECT_DOUBLE_EQ(plans[0].sum_us, exhaustive_best(space, smooth));
  EXPECT_EQ(canonical_text(plans[0].plan), "a BT=32,x=3,y=1; bc BT=32,x=3,y=1");
}

// No config has a neighbour one tunable away: a search by single steps would end at the default.
TEST(Search, ReachesConfigsThatContractsCouple) {
  const SearchSpace space = coupled_space();
  const Cost cost = [](const Group&, const Config& config) {
    double us = 100;
    for (const char* name : {"s", "t", "u", "v", "w"})
      us += std::pow(2 - static_cast<double>(config.integer(name)), 2) * 5;
    return us + 3 * static_cast<double>(config.integer("s") * config.integer("t"));
  };
  SyntheticLaboratory laboratory(space, cost);
  Results results(space);
  EXPECT_TRUE(run_search(space, Search(space, false), laboratory, unlimited(), results).complete);
  double best = INFINITY;
  for (const Config& config : space.groups[0].configs)
    best = std::min(best, cost(space.groups[0], config));
  EXPECT_DOUBLE_EQ(results.bar(0), best);
  EXPECT_LT(laboratory.measured, space.size() / 2);
}

TEST(Search, SweepsWhereTheBudgetHasRoom) {
  const SearchSpace space = coupled_space();
  const Cost cost = [](const Group&, const Config& config) {
    return config == coupled_space().groups[0].configs.back() ? 1.0 : 100.0;
  };
  for (const double budget : {100.0, 1000.0}) {
    double now = 0;
    SyntheticLaboratory laboratory(space, cost);
    laboratory.now = &now;
    LoopLimits limits;
    limits.elapsed_s = [&] { return now; };
    limits.deadline_s = budget;
    std::vector<TuneProgress::Phase> phases;
    limits.progress = [&](const TuneProgress& at) { phases.push_back(at.phase); };
    Results results(space);
    const LoopEnd end = run_search(space, Search(space, false), laboratory, limits, results);
    const bool room = budget > static_cast<double>(space.size());
    EXPECT_TRUE(end.complete);
    EXPECT_EQ(end.exhaustive, room);
    EXPECT_EQ(results.bar(0), room ? 1.0 : 100.0);
    EXPECT_EQ(laboratory.measured == space.size(), room);
    EXPECT_EQ(end.sweep_configs > 0, room);
    EXPECT_EQ(end.sweep_s, static_cast<double>(end.sweep_configs));
    EXPECT_EQ(phases.front(), TuneProgress::Phase::searching);
    EXPECT_EQ(phases.back() == TuneProgress::Phase::sweeping, room);
  }
}

// The best of 341 configs is among the first tenth that is measured, not the middle as by chance.
TEST(Search, PromisingConfigsComeFirst) {
  const SearchSpace space = coupled_space();
  double rank = 0;
  constexpr int kSeeds = 8;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    std::mt19937_64 random(static_cast<std::uint64_t>(seed));
    std::uniform_real_distribution<double> weight(-10, 10);
    std::map<std::string, double> weights;
    for (const char* name : {"s", "t", "u", "v", "w", "st", "uv"}) weights[name] = weight(random);
    const Cost cost = [&](const Group&, const Config& config) {
      double us = 300;
      for (const auto& [name, by] : weights) {
        double product = by;
        for (const char letter : name)
          product *= static_cast<double>(config.integer(std::string(1, letter)));
        us += product / (name.size() > 1 ? 2 : 1);
      }
      return us;
    };
    double best = INFINITY;
    for (const Config& config : space.groups[0].configs)
      best = std::min(best, cost(space.groups[0], config));
    SyntheticLaboratory laboratory(space, cost);
    LoopLimits limits = unlimited();
    double found = 0;
    Results results(space);
    limits.progress = [&](const TuneProgress& at) {
      if (found == 0 && at.best_us <= 1.01 * best) found = static_cast<double>(at.done);
    };
    run_search(space, Search(space, true), laboratory, limits, results);
    rank += found / kSeeds;
  }
  EXPECT_LT(rank, 0.1 * static_cast<double>(space.size()));
}

TEST(Search, ExhaustiveFindsTheBestPlanOfARandomSpace) {
  const SearchSpace space = synthetic_space();
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::map<std::string, double> costs;
    std::mt19937_64 random(seed);
    const Cost cost = [&](const Group& group, const Config& config) {
      double& value = costs[group.template_id + config.to_string()];
      if (value == 0) value = std::uniform_real_distribution<double>(10, 100)(random);
      return value;
    };
    SyntheticLaboratory laboratory(space, cost);
    Results results(space);
    EXPECT_TRUE(run_search(space, Search(space, true), laboratory, unlimited(), results).complete);
    EXPECT_EQ(laboratory.measured, space.size());
    // A tie within one percent may go to the default or to the first by text.
    EXPECT_LE(best_plans(space, results, 1)[0].sum_us, 1.01 * exhaustive_best(space, cost));
  }
}

TEST(Search, RankedPlansAreInOrderAndDistinct) {
  const SearchSpace space = synthetic_space();
  SyntheticLaboratory laboratory(space, smooth);
  Results results(space);
  run_search(space, Search(space, true), laboratory, unlimited(), results);
  const auto plans = best_plans(space, results, 10);
  ASSERT_EQ(plans.size(), 4U);  // two covers for each of two chunk sizes
  for (std::size_t i = 1; i < plans.size(); ++i) {
    EXPECT_LE(plans[i - 1].sum_us, plans[i].sum_us);
    EXPECT_NE(plans[i - 1].plan, plans[i].plan);
  }
}

TEST(Search, NoisyRunsAgreeWithinTheTieBand) {
  const SearchSpace space = synthetic_space();
  std::map<std::string, int> winners;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    SyntheticLaboratory laboratory(space, smooth, seed);
    laboratory.noise = 0.005;
    Results results(space);
    run_search(space, Search(space, false), laboratory, unlimited(), results);
    ++winners[canonical_text(best_plans(space, results, 1)[0].plan)];
  }
  EXPECT_EQ(winners["a BT=32,x=3,y=1; bc BT=32,x=3,y=1"], 50);
}

TEST(Search, AGroupWhoseDefaultIsWrongTriesItsOtherConfigs) {
  const SearchSpace space = synthetic_space();
  const Cost cost = [](const Group& group, const Config& config) {
    const bool broken = group.template_id == "a" && config.integer("x") != 2;
    return broken ? 0.0 : smooth(group, config);
  };
  SyntheticLaboratory laboratory(space, cost);
  Results results(space);
  EXPECT_TRUE(run_search(space, Search(space, false), laboratory, unlimited(), results).complete);
  ASSERT_FALSE(best_plans(space, results, 1).empty());
  EXPECT_EQ(best_plans(space, results, 1)[0].plan[0].config.integer("x"), 2);
  EXPECT_GT(count(space, results).wrong, 0);
}

TEST(Search, HopelessChunkSizesAndNegligibleStepsAreLeftAlone) {
  const SearchSpace space = synthetic_space();
  const Cost cost = [](const Group& group, const Config&) {
    if (group.template_id == "a") return 0.1;
    return group.BT == 32 ? 1000.0 : 50.0;
  };
  SyntheticLaboratory laboratory(space, cost);
  Results results(space);
  EXPECT_TRUE(run_search(space, Search(space, false), laboratory, unlimited(), results).complete);
  for (std::size_t group : {std::size_t{0}, std::size_t{4}, std::size_t{5}, std::size_t{6}})
    for (std::size_t config = 1; config < 16; ++config)
      EXPECT_EQ(results.find({group, config}), nullptr);
  EXPECT_NE(results.find({1, 1}), nullptr);
}

TEST(Search, DefaultsComeFirst) {
  const SearchSpace space = synthetic_space();
  const auto round = Search(space, false).next_round(Results(space));
  ASSERT_EQ(round.size(), space.groups.size());
  for (const Candidate& candidate : round)
    EXPECT_EQ(candidate.config, space.groups[candidate.group].default_config);
}

TEST(Loop, StopsAtTheDeadlineWithTheBestSoFar) {
  const SearchSpace space = synthetic_space();
  double now = 0;
  SyntheticLaboratory laboratory(space, smooth);
  laboratory.now = &now;
  LoopLimits limits;
  limits.elapsed_s = [&] { return now; };
  limits.deadline_s = 20;
  Results results(space);
  const LoopEnd end = run_search(space, Search(space, false), laboratory, limits, results);
  EXPECT_FALSE(end.complete);
  EXPECT_FALSE(end.interrupted);
  EXPECT_EQ(laboratory.measured, 20U);
  EXPECT_FALSE(best_plans(space, results, 1).empty());
}

TEST(Loop, ResumesAfterAnInterruptionAndMeasuresNothingTwice) {
  const SearchSpace space = synthetic_space();
  SyntheticLaboratory whole(space, smooth), halved(space, smooth);
  Results results(space);
  run_search(space, Search(space, false), whole, unlimited(), results);

  LoopLimits limits = unlimited();
  limits.interrupted = [&] { return halved.measured >= 13; };
  Results first(space), second(space), third(space);
  EXPECT_TRUE(run_search(space, Search(space, false), halved, limits, first).interrupted);
  EXPECT_EQ(halved.measured, 13U);
  limits.interrupted = nullptr;
  EXPECT_TRUE(run_search(space, Search(space, false), halved, limits, second).complete);
  const std::size_t measured = halved.measured;
  EXPECT_EQ(halved.rows.size(), measured) << "measured twice";
  EXPECT_EQ(count(space, second).reused, 13);

  halved.announced = 0;
  EXPECT_TRUE(run_search(space, Search(space, false), halved, limits, third).complete);
  EXPECT_EQ(halved.measured, measured);
  EXPECT_EQ(halved.announced, 0U);
  EXPECT_EQ(best_plans(space, third, 1)[0].plan, best_plans(space, results, 1)[0].plan);
}

TEST(Loop, ForceMeasuresAgain) {
  const SearchSpace space = synthetic_space();
  SyntheticLaboratory laboratory(space, smooth);
  Results first(space), second(space);
  run_search(space, Search(space, false), laboratory, unlimited(), first);
  const std::size_t once = laboratory.measured;
  LoopLimits limits = unlimited();
  limits.force = true;
  run_search(space, Search(space, false), laboratory, limits, second);
  EXPECT_EQ(laboratory.measured, 2 * once);
  EXPECT_EQ(count(space, second).reused, 0);
}

TEST(Loop, ReportsEveryMeasurement) {
  const SearchSpace space = synthetic_space();
  SyntheticLaboratory laboratory(space, smooth);
  std::vector<TuneProgress> seen;
  LoopLimits limits = unlimited();
  limits.progress = [&](const TuneProgress& progress) { seen.push_back(progress); };
  Results results(space);
  run_search(space, Search(space, false), laboratory, limits, results);
  ASSERT_EQ(seen.size(), laboratory.measured);
  EXPECT_EQ(seen.front().candidate, "a BT=64,x=0,y=0");
  EXPECT_EQ(seen.front().done, 1);
  EXPECT_EQ(seen.back().done, seen.back().total);
  EXPECT_GT(seen.back().best_us, 0);
}

PlanTiming timed(const char* name, std::vector<double> samples, Status status = Status::ok) {
  return {Plan{{name, {}}}, status, "", std::move(samples)};
}

TEST(Choose, TheFastestWinsOutsideTheNoise) {
  const std::vector<PlanTiming> timings{timed("d", {10, 10.1, 9.9}), timed("b", {8, 8.1, 7.9}),
                                        timed("a", {9, 9.1, 8.9}),
                                        timed("c", {1, 1, 1}, Status::wrong)};
  EXPECT_EQ(choose_winner(timings, timings[0].plan), 1U);
}

TEST(Choose, OnlyAPlanThatBeatsTheDefaultBeyondNoiseReplacesIt) {
  const std::vector<PlanTiming> near{timed("d", {10, 10.3, 9.9}), timed("c", {9.95, 10.2, 9.7}),
                                     timed("a", {9.96, 10.2, 9.7})};
  EXPECT_EQ(choose_winner(near, near[0].plan), 0U);
  // Faster by its median, but as often slower.
  const std::vector<PlanTiming> doubtful{timed("d", {10, 10, 10, 10, 10}),
                                         timed("c", {9, 9.2, 9.7, 10.8, 11})};
  EXPECT_EQ(choose_winner(doubtful, doubtful[0].plan), 0U);
}

TEST(Choose, TiesGoToTheIncumbentThenToFewerResources) {
  std::vector<PlanTiming> near{timed("d", {10, 10.3, 9.9}), timed("a", {8, 8.2, 7.9}),
                               timed("b", {8.02, 8.22, 7.92}), timed("c", {8.03, 8.23, 7.93})};
  near[1].footprint.block_bytes = 300;
  near[2].footprint.block_bytes = 200;
  near[3].footprint.block_bytes = 200;
  EXPECT_EQ(choose_winner(near, near[0].plan), 2U);
  EXPECT_EQ(choose_winner(near, near[0].plan, near[3].plan), 3U);
  near[2].footprint.spill_bytes = 8;
  EXPECT_EQ(choose_winner(near, near[0].plan), 3U);
}

TEST(Choose, NothingWinsWhenNothingIsRight) {
  const std::vector<PlanTiming> timings{timed("d", {}, Status::crashed),
                                        timed("a", {1}, Status::wrong)};
  EXPECT_FALSE(choose_winner(timings, timings[0].plan).has_value());
  EXPECT_FALSE(choose_winner({}, {}).has_value());
}

TEST(Statistics, MedianSpreadAndNoise) {
  const std::vector<double> odd{5, 1, 3}, even{4, 1, 3, 2};
  EXPECT_DOUBLE_EQ(summarize(odd).median, 3);
  EXPECT_DOUBLE_EQ(summarize(odd).spread, 2);
  EXPECT_DOUBLE_EQ(summarize(even).median, 2.5);
  EXPECT_DOUBLE_EQ(summarize({}).median, 0);
  const std::vector<double> steady(9, 7.0);
  EXPECT_DOUBLE_EQ(summarize(steady).noise, 0);
}

TEST(Statistics, TiesAreBoundedOnBothSides) {
  const Timing quiet{100, 0, 0}, noisy{104, 20, 30}, far{106, 20, 30}, close{100.9, 0, 0};
  EXPECT_TRUE(tied(quiet, close));
  EXPECT_TRUE(tied(quiet, noisy));
  EXPECT_FALSE(tied(quiet, far));
  const Timing apart{102, 0, 0.5};
  EXPECT_FALSE(tied(quiet, apart));
}

TEST(Statistics, DriftThatSlowsNeighboursAlikeHidesNoDifference) {
  const std::vector<double> fastest{10, 20, 30, 15, 12}, slower{10.4, 20.8, 31.2, 15.6, 12.48};
  EXPECT_TRUE(tied(summarize(fastest), summarize(slower)));
  EXPECT_FALSE(tied_in_turn(slower, fastest));
  const std::vector<double> same{10.1, 19.8, 30.2, 15, 11.9};
  EXPECT_TRUE(tied_in_turn(same, fastest));
}

TEST(Statistics, ClearlySlowerNeedsTwoSamplesThatAgree) {
  const std::vector<double> hiccup{40}, slow{2.1, 1.6}, repaired{40, 1.4};
  EXPECT_FALSE(clearly_slower(hiccup, 1));
  EXPECT_TRUE(clearly_slower(slow, 1));
  EXPECT_FALSE(clearly_slower(repaired, 1));
  EXPECT_FALSE(clearly_slower(slow, 0));
}

TEST(Statistics, HiccupsHideNoDifference) {
  std::vector<double> base(20, 10), faster(20, 9.5), same(20, 9.95), doubtful(20, 9.5);
  for (const std::size_t i : {2U, 7U, 11U}) base[i] = 300;
  for (const std::size_t i : {3U, 8U, 12U, 15U}) faster[i] = 200;
  EXPECT_TRUE(beats(faster, base));
  EXPECT_FALSE(beats(same, base));  // within the one percent
  for (std::size_t i = 0; i < 9; ++i) doubtful[2 * i] = 10.5;
  EXPECT_FALSE(beats(doubtful, base));
  EXPECT_FALSE(beats({}, {}));
}

}  // namespace
}  // namespace wyvern
