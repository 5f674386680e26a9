// Spaces and machines made to mislead a tuning: from the first candidate to the winner.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "autotune/contest.hpp"
#include "autotune/loop.hpp"
#include "autotune/synthetic_laboratory.hpp"
#include "autotune/synthetic_space.hpp"

namespace wyvern {
namespace {

using Digits = std::vector<double>;

/// A cost by the five tunables of coupled_space(), each 0 to 3; all 0 is the default.
Cost by_digits(const std::function<double(const Digits&)>& cost) {
  return [cost](const Group&, const Config& config) {
    Digits digits;
    for (const char* name : {"s", "t", "u", "v", "w"})
      digits.push_back(static_cast<double>(config.integer(name)));
    return cost(digits);
  };
}

double sum(const Digits& digits) { return std::accumulate(digits.begin(), digits.end(), 0.0); }

/// Coupled in pairs, 35% between the best and the default.
double rugged(const Digits& d) {
  const auto square = [](double x) { return x * x; };
  return 100 + 3 * square(d[0] - 2) + 2 * square(d[1] + d[2] - 4) + 3 * square(d[3] - d[4]) +
         1.5 * std::fabs(d[2] - 1) - 0.7 * d[4];
}

class Adversary : public testing::Test {
 protected:
  /// All of a tuning as Tuning::run() does it, each measurement a second.
  double tuned(const Cost& cost, std::uint64_t seed, double budget_s) {
    SyntheticLaboratory laboratory(space_, cost, seed);
    double now = 0;
    laboratory.now = &now;
    laboratory.noise = noise;
    laboratory.drift = drift;
    laboratory.hiccups = hiccups;
    laboratory.trend = trend;
    LoopLimits limits;
    limits.elapsed_s = [&] { return now; };
    limits.deadline_s = budget_s;
    Results results(space_);
    const Search search(space_, false);
    const LoopEnd end = run_search(space_, search, laboratory, limits, results);
    Contest contest(space_, laboratory, results, {});
    EXPECT_TRUE(contest.race(1));
    if (end.complete) run_search(space_, search, laboratory, limits, results);
    measured = laboratory.measured;
    const auto winner = contest.decide(1, [](std::size_t) {});
    return laboratory.plan_cost(contest.timings().at(winner.value()).plan);
  }
  double best(const Cost& cost) const {
    double least = INFINITY;
    for (const Config& config : space_.groups[0].configs)
      least = std::min(least, cost(space_.groups[0], config));
    return least;
  }
  /// Twenty tunings: a mean regret of a percent, three at the worst but one, and winners that are
  /// the same or within a percent.
  void expect_sound(const Cost& cost, double budget_s) {
    std::vector<double> taken;
    for (std::uint64_t seed = 1; seed <= 20; ++seed) taken.push_back(tuned(cost, seed, budget_s));
    int close = 0;
    for (std::size_t i = 1; i < taken.size(); ++i)
      close += std::fabs(taken[i] / taken[i - 1] - 1) <= 0.01 ? 1 : 0;
    EXPECT_GE(close, 18) << "of 19 pairs";
    std::sort(taken.begin(), taken.end());
    EXPECT_LE(std::accumulate(taken.begin(), taken.end(), 0.0) / 20, 1.01 * best(cost));
    EXPECT_LE(taken[18], 1.03 * best(cost));
  }

  const SearchSpace space_ = coupled_space();
  double noise = 0.005, drift = 0.01, hiccups = 0, trend = 0;
  std::size_t measured = 0;
};

// Changes of two tunables gain less than a tie with the default.
TEST_F(Adversary, ASlopeGentlerThanATie) {
  const Cost cost = by_digits([](const Digits& d) { return 100 - 0.15 * sum(d); });
  noise = drift = 0;
  const double taken = tuned(cost, 1, 250);  // no room for all 341
  EXPECT_LT(measured, 250U);
  EXPECT_LE(taken, 1.0101 * best(cost));
}

// Flat but for steps, each of which needs two tunables to change at once.
TEST_F(Adversary, APlateauWithStairs) {
  const Cost cost = by_digits([](const Digits& d) {
    const bool first = d[0] == 3 && d[1] == 3, second = first && d[2] == 3 && d[3] == 3;
    return second ? 80.0 : first ? 90.0 : 100.0;
  });
  expect_sound(cost, 1000);
  noise = drift = 0;
  EXPECT_EQ(tuned(cost, 1, 250), 80);
}

// All that is near the default leads away from the best, which lies alone on the other side.
TEST_F(Adversary, ATrap) {
  const Cost cost = by_digits([](const Digits& d) {
    const bool hole = d[0] == 3 && d[1] == 3 && d[2] == 3 && d[3] == 0 && d[4] == 3;
    return hole ? 60.0 : 100 - 2 * d[3] + sum(d);
  });
  noise = drift = 0;
  EXPECT_EQ(tuned(cost, 1, 1000), 60) << "where the budget has room for every config";
  EXPECT_LE(tuned(cost, 1, 60), 97) << "what a local search can know";
}

TEST_F(Adversary, ALevelSpaceKeepsItsDefault) {
  const Cost cost = by_digits([](const Digits& d) { return sum(d) == 0 ? 100.0 : 99.8; });
  for (std::uint64_t seed = 1; seed <= 20; ++seed) EXPECT_EQ(tuned(cost, seed, 1000), 100);
}

TEST_F(Adversary, ANoisyMachine) {
  noise = 0.02;
  drift = 0.02;
  expect_sound(by_digits(rugged), 1000);
}

TEST_F(Adversary, AMachineWithHiccups) {
  hiccups = 0.1;
  expect_sound(by_digits(rugged), 1000);
}

// The clocks fall by a sixth of themselves while candidates are measured.
TEST_F(Adversary, AMachineThatWarmsUp) {
  trend = 0.0005;
  expect_sound(by_digits(rugged), 1000);
}

}  // namespace
}  // namespace wyvern
