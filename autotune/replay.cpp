#include "autotune/replay.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "autotune/contest.hpp"
#include "autotune/laboratory.hpp"
#include "autotune/loop.hpp"

namespace wyvern {
namespace {

/// Rounds in turn: as Bench has them.
constexpr double kFewestRounds = 3, kMostRaced = 20, kMostCompared = 100;
/// For racing, and for comparing.
constexpr double kRoundsSeconds = 2;
/// The share of a tuning's time for starting a worker, racing and comparing.
constexpr double kComparingShare = 0.1;

/// Answers from a recording, in its time.
class ReplayLaboratory final : public Laboratory {
 public:
  ReplayLaboratory(const Recording& recording, const ReplayOptions& options, std::uint64_t seed)
      : recording_(recording), drift_(options.drift), random_(seed) {}

  double now() const { return now_s_; }

  std::optional<Outcome> recall(const Candidate&) override { return {}; }
  void announce(std::span<const Candidate>) override {}

  std::optional<Resources> resources(const Candidate& candidate) override {
    return recording_.results.resources(candidate);
  }

  std::optional<Outcome> measure(const Candidate& candidate, double bar) override {
    Outcome outcome = *recording_.results.find(candidate);
    const double compile_s = outcome.compile_ms / 1e3 / recording_.head.jobs;
    const double measure_s = outcome.measure_ms / 1e3;
    now_s_ += recording_.head.overlap ? std::max(compile_s, measure_s) : compile_s + measure_s;
    ++measured_;
    if (outcome.status != Status::ok && outcome.status != Status::rejected) return outcome;
    if (outcome.samples.empty()) return outcome;  // spilled, and was not run
    const double pace = window();
    const std::vector<double> recorded = std::move(outcome.samples);
    outcome.samples.clear();
    outcome.status = Status::ok;
    while (outcome.samples.size() < recorded.size()) {
      outcome.samples.push_back(pick(recorded) * pace);
      if (outcome.samples.size() < 3 && clearly_slower(outcome.samples, bar))
        outcome.status = Status::rejected;
      if (outcome.status == Status::rejected) break;
    }
    return outcome;
  }

  std::optional<std::vector<Series>> race(std::span<const Candidate> candidates,
                                          double seconds) override {
    std::vector<Series> series(candidates.size());
    double us = 0;
    for (const Candidate& candidate : candidates) us += recording_.results.timing(candidate).median;
    for (std::size_t round = 0; round < rounds(seconds, us, kMostRaced); ++round) {
      const double pace = window();
      for (std::size_t i = 0; i < candidates.size(); ++i)
        series[i].samples.push_back(pick(recording_.results.find(candidates[i])->samples) * pace);
    }
    return series;
  }
  void remember(const Candidate&, const Outcome&) override {}

  std::vector<PlanTiming> compare(std::span<const Plan> plans, double seconds) override {
    std::vector<PlanTiming> timings;
    double us = 0;
    for (const Plan& plan : plans) {
      const auto taken = recorded_us(recording_, plan);
      us += taken.value_or(0);
      timings.push_back({plan, taken ? Status::ok : Status::failed, "", {}, {}});
    }
    for (std::size_t round = 0; round < rounds(seconds, us, kMostCompared); ++round) {
      const double pace = window();
      for (PlanTiming& timing : timings)
        if (timing.status == Status::ok) timing.samples.push_back(sample(timing.plan) * pace);
    }
    return timings;
  }
  std::int64_t compiled() const override { return measured_; }

 private:
  static std::size_t rounds(double seconds, double us, double most) {
    return static_cast<std::size_t>(
        std::clamp(1e6 * seconds / std::max(us, 1e-3), kFewestRounds, most));
  }
  double window() { return 1 + std::uniform_real_distribution<double>(-drift_, drift_)(random_); }
  double pick(const std::vector<double>& samples) {
    return samples[std::uniform_int_distribution<std::size_t>(0, samples.size() - 1)(random_)];
  }
  /// A whole operator once: a sample of each step.
  double sample(const Plan& plan) {
    const auto candidates = candidates_of(recording_.space, plan);
    double sum = 0;
    for (const Candidate& at : candidates.value())
      sum += pick(recording_.results.find(at)->samples);
    return sum;
  }

  const Recording& recording_;
  double drift_;
  std::mt19937_64 random_;
  double now_s_ = 0;
  std::int64_t measured_ = 0;
};

/// One tuning of the recording.
struct Trial {
  Plan winner;
  double us = 0;
  double seconds_to_5_percent = 0, seconds = 0;
  std::int64_t measured = 0;
  bool exhaustive = false;
};

Trial tune_once(const Recording& recording, const ReplayOptions& options, double best_us,
                std::uint64_t seed) {
  ReplayLaboratory laboratory(recording, options, seed);
  Results results(recording.space);
  Trial trial;
  LoopLimits limits;
  limits.elapsed_s = [&] { return laboratory.now(); };
  limits.deadline_s = (1 - kComparingShare) * options.budget_s;
  limits.sweep = options.sweep;
  limits.progress = [&](const TuneProgress&) {
    if (trial.seconds_to_5_percent > 0) return;
    const auto plans = best_plans(recording.space, results, 1);
    if (plans.empty()) return;
    const auto us = recorded_us(recording, plans.front().plan);
    if (us && *us <= 1.05 * best_us) trial.seconds_to_5_percent = laboratory.now();
  };
  const LoopEnd end =
      run_search(recording.space, Search(recording.space, false), laboratory, limits, results);
  trial.seconds = laboratory.now();
  if (trial.seconds_to_5_percent == 0) trial.seconds_to_5_percent = options.budget_s;
  trial.measured = laboratory.compiled();
  trial.exhaustive = end.exhaustive;
  Contest contest(recording.space, laboratory, results, {});
  contest.race(kRoundsSeconds);
  const auto winner = contest.decide(kRoundsSeconds, [](std::size_t) {});
  trial.winner = winner ? contest.timings()[*winner].plan : recording.space.default_plan;
  trial.us = recorded_us(recording, trial.winner).value_or(0);
  return trial;
}

double mean(const std::vector<Trial>& trials, double (*of)(const Trial&)) {
  double sum = 0;
  for (const Trial& trial : trials) sum += of(trial) / static_cast<double>(trials.size());
  return sum;
}

/// The most frequent winner; among several the cheapest.
const Trial& most_frequent(const std::vector<Trial>& trials) {
  std::map<std::string, std::size_t> counts;
  for (const Trial& trial : trials) ++counts[canonical_text(trial.winner)];
  return *std::ranges::min_element(trials, {}, [&](const Trial& trial) {
    return std::pair(-static_cast<double>(counts.at(canonical_text(trial.winner))), trial.us);
  });
}

}  // namespace

std::optional<double> recorded_us(const Recording& recording, const Plan& plan) {
  const auto candidates = candidates_of(recording.space, plan);
  if (!candidates) return {};
  double sum = 0;
  for (const Candidate& at : *candidates) {
    const double us = recording.results.timing(at).median;
    if (us <= 0) return {};
    sum += us;
  }
  return sum;
}

Plan recorded_best(const Recording& recording) {
  const SearchSpace& space = recording.space;
  // best_plans() prefers a default that is tied; here the cheapest counts, by however little.
  Results fastest(space);
  for (std::size_t g = 0; g < space.groups.size(); ++g) {
    std::optional<std::size_t> least;
    for (std::size_t i = 0; i < space.groups[g].configs.size(); ++i) {
      const double us = recording.results.timing({g, i}).median;
      if (us > 0 && (!least || us < recording.results.timing({g, *least}).median)) least = i;
    }
    if (least) fastest.put({g, *least}, *recording.results.find({g, *least}));
  }
  std::vector<RankedPlan> plans = best_plans(space, fastest, 1);
  if (plans.empty())
    throw Error(ErrorKind::kBadInput,
                fmt::format("the recording of {} has no plan that is right throughout",
                            problem_key(recording.head.problem).to_string()));
  return std::move(plans.front().plan);
}

ReplayReport replay(const Recording& recording, const ReplayOptions& options) {
  const double best_us = recorded_us(recording, recorded_best(recording)).value();
  std::vector<Trial> trials;
  for (int seed = 1; seed <= options.seeds; ++seed)
    trials.push_back(tune_once(recording, options, best_us, static_cast<std::uint64_t>(seed)));
  ReplayReport report;
  report.configs = static_cast<std::int64_t>(recording.space.size());
  for (const auto& group : recording.results.all())
    for (const auto& outcome : group)
      if (outcome)
        report.exhaustive_s +=
            outcome->measure_ms / 1e3 + outcome->compile_ms / 1e3 / recording.head.jobs;
  if (const auto us = recorded_us(recording, recording.space.default_plan))
    report.default_over_best = *us / best_us;
  std::vector<double> regrets;
  for (const Trial& trial : trials) regrets.push_back(trial.us / best_us - 1);
  std::sort(regrets.begin(), regrets.end());
  report.regret_mean =
      std::accumulate(regrets.begin(), regrets.end(), 0.0) / static_cast<double>(regrets.size());
  report.regret_p95 = regrets[(regrets.size() * 95 + 99) / 100 - 1];
  report.regret_max = regrets.back();
  const Trial& usual = most_frequent(trials);
  for (const Trial& trial : trials) {
    const double share = 1.0 / static_cast<double>(trials.size());
    if (trial.winner == usual.winner) report.same_winner += share;
    if (trial.us <= 1.01 * usual.us && usual.us <= 1.01 * trial.us) report.within_percent += share;
  }
  report.seconds_to_5_percent = mean(trials, [](const Trial& t) { return t.seconds_to_5_percent; });
  report.seconds = mean(trials, [](const Trial& t) { return t.seconds; });
  report.measured = mean(trials, [](const Trial& t) { return static_cast<double>(t.measured); });
  report.exhaustive = mean(trials, [](const Trial& t) { return t.exhaustive ? 1.0 : 0.0; });
  return report;
}

}  // namespace wyvern
