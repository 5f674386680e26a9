// For tests: a laboratory that answers from a model of costs.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <random>

#include "autotune/laboratory.hpp"
#include "autotune/statistics.hpp"

namespace wyvern {

using Cost = std::function<double(const Group&, const Config&)>;

/// Answers from a cost model; a later laboratory can recall its measurements.
class SyntheticLaboratory : public Laboratory {
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
    const double pace = window();
    Outcome outcome;
    outcome.ran = true;
    outcome.status = cost > 0 ? Status::ok : Status::wrong;
    for (int i = 0; i < 9 && cost > 0 && outcome.status == Status::ok; ++i) {
      outcome.samples.push_back(cost * pace * jitter());
      if (outcome.samples.size() < 3 && clearly_slower(outcome.samples, bar))
        outcome.status = Status::rejected;
    }
    rows[candidate] = outcome;
    return outcome;
  }
  std::optional<std::vector<Series>> race(std::span<const Candidate> candidates, double) override {
    std::vector<Series> series(candidates.size());
    for (int round = 0; round < kInTurn; ++round) {
      const double pace = window();
      for (std::size_t i = 0; i < candidates.size(); ++i) {
        const Group& group = space_.groups[candidates[i].group];
        series[i].samples.push_back(cost_(group, group.configs[candidates[i].config]) * pace *
                                    jitter());
      }
    }
    return series;
  }
  void remember(const Candidate& candidate, const Outcome& outcome) override {
    rows[candidate] = outcome;
  }
  std::vector<PlanTiming> compare(std::span<const Plan> plans, double) override {
    std::vector<PlanTiming> timings;
    for (const Plan& plan : plans) timings.push_back({plan, Status::ok, "", {}});
    for (int round = 0; round < kInTurn; ++round) {
      const double pace = window();
      for (PlanTiming& timing : timings)
        timing.samples.push_back(plan_cost(timing.plan) * pace * jitter());
    }
    return timings;
  }
  double pace_change() const override { return trend * static_cast<double>(goes_); }
  std::int64_t compiled() const override { return 0; }

  std::map<Candidate, Outcome> rows;
  std::size_t measured = 0, announced = 0;
  double noise = 0;       ///< each sample is off by up to this share
  double drift = 0;       ///< samples of one window are off by the same share, up to this
  double hiccups = 0;     ///< this share of the samples takes ten times as long
  double trend = 0;       ///< each window is slower than the one before by this share of the first
  double* now = nullptr;  ///< advanced by a second per measurement

  /// The whole operator's time: the sum of its steps.
  double plan_cost(const Plan& plan) const {
    double sum = 0;
    for (const PlanStep& step : plan)
      for (const Group& group : space_.groups)
        if (group.template_id == step.template_id &&
            group.configs.front().integer("BT") == step.config.integer("BT"))
          sum += cost_(group, step.config);
    return sum;
  }

 private:
  static constexpr int kInTurn = 20;
  double window() { return 1 + drift * jitter_(random_) + trend * static_cast<double>(goes_++); }
  double jitter() {
    const bool hiccup = hiccups > 0 && std::bernoulli_distribution(hiccups)(random_);
    return (hiccup ? 10 : 1) * (1 + noise * jitter_(random_));
  }

  const SearchSpace& space_;
  Cost cost_;
  std::mt19937_64 random_;
  std::size_t goes_ = 0;
  std::uniform_real_distribution<double> jitter_{-1, 1};
};

}  // namespace wyvern
