#include "autotune/contest.hpp"

#include <algorithm>
#include <cmath>
#include <set>

namespace wyvern {
namespace {

/// Medians of different minutes differ by drift, about a percent each, and by noise; by more if the
/// device's speed has changed by more than noise.
constexpr double kRaced = 1.06;
constexpr double kMostDrift = 0.2;
constexpr double kMostRaced = 24;  ///< within kRaced; proportionally more if that is larger
/// Measured in turn, remaining differences are noise.
constexpr double kTied = 1.02;
constexpr std::size_t kMostSwaps = 24;
constexpr std::size_t kRanked = 3;
/// A chunk size whose best sum is within this factor of the best is compared too: effects that sums
/// leave out (launches, data cached between steps) are of this order.
constexpr double kNear = 1.25;
/// A group below this share of the whole changes it by less than noise.
constexpr double kNegligible = 1.0 / 200;
/// Plans of the first round that enter the second.
constexpr std::size_t kSecondRound = 6;

Footprint footprint_of(const SearchSpace& space, const Results& results,
                       const std::vector<Candidate>& candidates) {
  Footprint sum;
  for (const Candidate& candidate : candidates) sum += footprint(space, results, candidate);
  return sum;
}

bool ran(const PlanTiming& timing) {
  return timing.status == Status::ok && !timing.samples.empty();
}

}  // namespace

Contest::Contest(const SearchSpace& space, Laboratory& laboratory, Results& results, Plan incumbent)
    : space_(space), laboratory_(laboratory), results_(results), incumbent_(std::move(incumbent)) {}

bool Contest::matters(std::size_t group, double best_us, double through_us) const {
  return through_us <= kNear * best_us && results_.bar(group) >= kNegligible * best_us;
}

/// The group's ok configs whose medians are within `share` of its best, the fastest first.
std::vector<std::size_t> Contest::near_ties(std::size_t group, double share,
                                            std::size_t most) const {
  const auto median = [&](std::size_t i) { return results_.timing({group, i}).median; };
  const double bar = results_.bar(group);
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < space_.groups[group].configs.size(); ++i)
    if (median(i) > 0 && median(i) <= share * bar) found.push_back(i);
  std::ranges::stable_sort(found, {}, median);
  if (found.size() > most) found.resize(most);
  return found;
}

bool Contest::race(double seconds) {
  const std::vector<RankedPlan> best = best_plans(space_, results_, 1);
  if (best.empty()) return true;
  const std::vector<double> through = costs_through(space_, results_);
  const double share = kRaced + std::min(laboratory_.pace_change(), kMostDrift);
  const auto most = static_cast<std::size_t>(std::round(kMostRaced * (share - 1) / (kRaced - 1)));
  std::vector<std::vector<Candidate>> heats;
  for (std::size_t group = 0; group < space_.groups.size(); ++group) {
    if (!matters(group, best.front().sum_us, through[group])) continue;
    std::vector<Candidate> heat;
    for (const std::size_t i : near_ties(group, share, most)) heat.push_back({group, i});
    if (heat.size() > 1) heats.push_back(std::move(heat));
  }
  for (const std::vector<Candidate>& heat : heats) {
    auto series = laboratory_.race(heat, seconds / static_cast<double>(heats.size()));
    if (!series) return false;
    for (std::size_t i = 0; i < heat.size(); ++i) {
      Series& own = (*series)[i];
      if (own.samples.empty()) continue;  // it was correct before: its earlier time remains
      Outcome outcome = *results_.find(heat[i]);
      outcome.samples = std::move(own.samples);
      outcome.clocks_mhz = std::move(own.clocks_mhz);
      laboratory_.remember(heat[i], outcome);
      results_.put(heat[i], std::move(outcome));
    }
  }
  return true;
}

void Contest::add(Plan plan, Footprint footprint, std::optional<std::size_t> step) {
  const auto same = [&](const Entry& entry) { return entry.plan == plan; };
  if (std::ranges::none_of(entries_, same)) entries_.push_back({std::move(plan), footprint, step});
}

void Contest::add(const RankedPlan& plan) {
  add(plan.plan, footprint_of(space_, results_, plan.candidates));
}

/// The default plan, the best ones and the best of every layer that is near.
void Contest::enter_ranked() {
  add(space_.default_plan, {});
  const std::vector<RankedPlan> ranked = best_plans(space_, results_, kRanked);
  for (const RankedPlan& plan : ranked) add(plan);
  if (ranked.empty()) return;
  for (const Layer& layer : space_.layers)
    for (const RankedPlan& plan : best_plans(space_, layer, results_, 1))
      if (plan.sum_us <= kNear * ranked.front().sum_us) add(plan);
}

/// The best plan with each tied config in place of its own.
void Contest::enter_swaps() {
  const std::vector<RankedPlan> ranked = best_plans(space_, results_, 1);
  if (ranked.empty()) return;
  const RankedPlan& best = ranked.front();
  best_ = best.plan;
  struct Swap {
    std::size_t step = 0, config = 0;
    double loss_us = 0;
  };
  std::vector<Swap> swaps;
  for (std::size_t step = 0; step < best.candidates.size(); ++step) {
    const std::size_t group = best.candidates[step].group;
    const double bar = results_.bar(group);
    if (bar < kNegligible * best.sum_us) continue;
    for (const std::size_t i : near_ties(group, kTied, kMostSwaps))
      swaps.push_back({step, i, results_.timing({group, i}).median - bar});
  }
  std::ranges::stable_sort(swaps, {}, &Swap::loss_us);
  for (const Swap& swap : swaps) {
    if (entries_.size() >= kMostSwaps + kRanked) return;
    RankedPlan plan = best;
    Candidate& changed = plan.candidates[swap.step];
    changed.config = swap.config;
    plan.plan[swap.step].config = space_.groups[changed.group].configs[changed.config];
    add(plan.plan, footprint_of(space_, results_, plan.candidates), swap.step);
  }
}

/// Times the entries; false when none ran.
bool Contest::run(double seconds, const std::function<void(std::size_t)>& begin) {
  std::vector<Plan> plans;
  for (const Entry& entry : entries_) plans.push_back(entry.plan);
  begin(plans.size());
  timings_ = laboratory_.compare(plans, seconds);
  bool any = false;
  for (std::size_t i = 0; i < timings_.size(); ++i) {
    timings_[i].footprint = entries_[i].footprint;
    any = any || ran(timings_[i]);
    if (timings_[i].status == Status::unjudged) unjudged_ = timings_[i];
  }
  return any;
}

/// The fastest plans of the first round, and one plan of all configs that beat the best plan's own.
std::vector<Contest::Entry> Contest::second_round() const {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < entries_.size(); ++i)
    if (ran(timings_[i])) order.push_back(i);
  const PlanTiming& base = timings_[order.front()];
  std::ranges::stable_sort(
      order, {}, [&](std::size_t i) { return ratio_in_turn(timings_[i].samples, base.samples); });
  std::vector<Entry> next;
  for (const std::size_t i : order) {
    const Plan& plan = entries_[i].plan;
    if (next.size() < kSecondRound || plan == space_.default_plan || plan == incumbent_)
      next.push_back(entries_[i]);
  }
  std::set<std::size_t> improved;
  Entry together{best_, {}, {}};
  for (const std::size_t i : order) {
    const Entry& entry = entries_[i];
    if (entry.plan == best_) break;
    if (!entry.step || !improved.insert(*entry.step).second) continue;
    together.plan[*entry.step] = entry.plan[*entry.step];
    together.footprint = entry.footprint;
  }
  if (improved.size() > 1) next.push_back(std::move(together));
  return next;
}

std::optional<std::size_t> Contest::decide(double seconds,
                                           const std::function<void(std::size_t)>& begin) {
  entries_.clear();
  enter_ranked();
  if (!incumbent_.empty()) add(incumbent_, {});
  enter_swaps();
  if (!run(seconds / 2, begin)) return {};
  std::vector<Entry> next = second_round();
  if (next.size() > 1) {
    entries_ = std::move(next);
    if (!run(seconds / 2, begin)) return {};
  }
  return choose_winner(timings_, space_.default_plan, incumbent_);
}

const PlanTiming* Contest::unjudged() const { return unjudged_ ? &*unjudged_ : nullptr; }

}  // namespace wyvern
