// Searching and choosing on synthetic costs: no device, no clock.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <random>

#include "autotune/choose.hpp"
#include "autotune/loop.hpp"
#include "autotune/search.hpp"
#include "autotune/synthetic_space.hpp"

namespace wyvern {
namespace {

using Cost = std::function<double(const Group&, const Config&)>;

/// Answers from a cost model; what it measured, a later one can recall.
class SyntheticLaboratory final : public Laboratory {
 public:
  SyntheticLaboratory(const SearchSpace& space, Cost cost, std::uint64_t seed = 1)
      : space_(space), cost_(std::move(cost)), random_(seed) {}

  std::optional<Outcome> recall(const Candidate& candidate) override {
    const auto known = rows.find(candidate);
    if (known == rows.end()) return {};
    Outcome outcome = known->second;
    outcome.reused = true;
    outcome.ran = false;
    return outcome;
  }
  void announce(std::span<const Candidate> candidates) override { announced += candidates.size(); }
  std::optional<Outcome> measure(const Candidate& candidate, double bar) override {
    if (now != nullptr) *now += 1;
    ++measured;
    const Group& group = space_.groups[candidate.group];
    const double cost = cost_(group, group.configs[candidate.config]);
    Outcome outcome;
    outcome.ran = true;
    outcome.status = cost > 0 ? Status::ok : Status::wrong;
    for (int i = 0; i < 9 && cost > 0 && outcome.status == Status::ok; ++i) {
      outcome.samples.push_back(cost * (1 + noise * jitter_(random_)));
      if (outcome.samples.size() < 3 && clearly_slower(outcome.samples, bar))
        outcome.status = Status::rejected;
    }
    rows[candidate] = outcome;
    return outcome;
  }
  std::vector<PlanTiming> compare(std::span<const Plan>, double) override { return {}; }
  std::int64_t compiled() const override { return 0; }

  std::map<Candidate, Outcome> rows;
  std::size_t measured = 0, announced = 0;
  double noise = 0;
  double* now = nullptr;  ///< advanced by a second per measurement

 private:
  const SearchSpace& space_;
  Cost cost_;
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> jitter_{-1, 1};
};

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
  EXPECT_LT(laboratory.measured, space.size());
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

TEST(Loop, ResumesWhatWasInterruptedAndMeasuresNothingTwice) {
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
  EXPECT_EQ(halved.measured, whole.measured);
  EXPECT_EQ(count(space, second).reused, 13);

  halved.announced = 0;
  EXPECT_TRUE(run_search(space, Search(space, false), halved, limits, third).complete);
  EXPECT_EQ(halved.measured, whole.measured);
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

TEST(Choose, TiesGoToTheDefaultThenToTheFirstByText) {
  const std::vector<PlanTiming> near{timed("d", {10, 10.3, 9.9}), timed("c", {9.95, 10.2, 9.7}),
                                     timed("a", {9.96, 10.2, 9.7})};
  EXPECT_EQ(choose_winner(near, near[0].plan), 0U);
  const std::vector<PlanTiming> others(near.begin() + 1, near.end());
  EXPECT_EQ(choose_winner(others, near[0].plan), 1U);
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

TEST(Statistics, ClearlySlowerNeedsTwiceAtFirstAndHalfAsMuchAgainLater) {
  const std::vector<double> one{1.9}, slow{2.1}, two{2.1, 1.6}, mended{2.1, 1.4};
  EXPECT_FALSE(clearly_slower(one, 1));
  EXPECT_TRUE(clearly_slower(slow, 1));
  EXPECT_TRUE(clearly_slower(two, 1));
  EXPECT_FALSE(clearly_slower(mended, 1));
  EXPECT_FALSE(clearly_slower(slow, 0));
}

}  // namespace
}  // namespace wyvern
