#include "autotune/search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "autotune/choose.hpp"

namespace wyvern {
namespace {

/// A local search gains tens of percent on a default, not a factor of two.
constexpr double kHopeless = 2.0;
constexpr double kNegligible = 1.0 / 200;

/// Whether an outcome has times, also that of a config found too slow.
bool is_timed(const Outcome& outcome) {
  return !outcome.samples.empty() &&
         (outcome.status == Status::ok || outcome.status == Status::rejected);
}

}  // namespace

/// The groups' best times so far.
struct Search::Standing {
  std::vector<double> through;  ///< least sum of a plan through each group
  double best = 0;              ///< of all of them; 0: no plan is known to work
  std::vector<double> own;      ///< each group's best time; 0: none

  Standing(const SearchSpace& space, const Results& results)
      : through(costs_through(space, results)) {
    for (std::size_t group = 0; group < space.groups.size(); ++group)
      own.push_back(results.bar(group));
    if (const auto plans = best_plans(space, results, 1); !plans.empty())
      best = plans.front().sum_us;
  }
  bool hopeless(std::size_t group) const { return best > 0 && through[group] > kHopeless * best; }
  bool negligible(std::size_t group) const {
    return best > 0 && own[group] > 0 && own[group] < kNegligible * best;
  }
};

Search::Search(const SearchSpace& space, bool exhaustive) : space_(space), exhaustive_(exhaustive) {
  for (const Group& group : space.groups) neighbourhoods_.emplace_back(group.configs);
}

std::vector<Candidate> Search::next_round(const Results& results, std::size_t room) const {
  std::vector<Candidate> round;
  for (std::size_t group = 0; group < space_.groups.size(); ++group) {
    const Candidate first{group, space_.groups[group].default_config};
    if (results.find(first) == nullptr) round.push_back(first);
  }
  if (!round.empty()) return round;
  const Standing standing(space_, results);
  if (exhaustive_) {
    for (std::size_t group = 0; group < space_.groups.size(); ++group)
      for (std::size_t i = 0; i < space_.groups[group].configs.size(); ++i)
        if (results.find({group, i}) == nullptr) round.push_back({group, i});
  } else {
    round = nearby(results, standing);
    if (round.empty() && room > 0) {
      for (const bool hopeless : {true, false}) {
        round = unmeasured(results, standing, hopeless);
        if (round.size() <= room) break;
        round.clear();
      }
    }
  }
  order(results, standing, round);
  return round;
}

bool Search::exhausted(const Results& results) const {
  return unmeasured(results, Standing(space_, results), true).empty();
}

/// The configs without a result, except those of negligible groups and, unless `hopeless`, of
/// hopeless groups.
std::vector<Candidate> Search::unmeasured(const Results& results, const Standing& standing,
                                          bool hopeless) const {
  std::vector<Candidate> found;
  for (std::size_t group = 0; group < space_.groups.size(); ++group) {
    if (standing.negligible(group) || (!hopeless && standing.hopeless(group))) continue;
    for (std::size_t i = 0; i < space_.groups[group].configs.size(); ++i)
      if (results.find({group, i}) == nullptr) found.push_back({group, i});
  }
  return found;
}

std::vector<Candidate> Search::nearby(const Results& results, const Standing& standing) const {
  std::vector<Candidate> found;
  for (std::size_t group = 0; group < space_.groups.size(); ++group) {
    if (standing.negligible(group) || standing.hopeless(group)) continue;
    if (const auto best = best_config(space_, results, group)) {
      // A config tied with the default counts as the default: a slope of ties would end there.
      std::set<std::size_t> near;
      for (const std::size_t from : {*best, *fastest_config(results, group)})
        for (const std::size_t i : neighbourhoods_[group].of(from)) near.insert(i);
      for (const std::size_t i : near)
        if (results.find({group, i}) == nullptr) found.push_back({group, i});
    } else {
      for (std::size_t i = 0; i < space_.groups[group].configs.size(); ++i)
        if (results.find({group, i}) == nullptr) found.push_back({group, i});
    }
  }
  return found;
}

/// The geometric mean of the times of the measured configs of the group that differ from the
/// candidate in the fewest tunables; 0: none has a time.
double Search::expected_us(const Results& results, const Candidate& candidate) const {
  std::size_t least = std::numeric_limits<std::size_t>::max();
  double sum = 0;
  double count = 0;
  for (std::size_t i = 0; i < space_.groups[candidate.group].configs.size(); ++i) {
    const Outcome* const outcome = results.find({candidate.group, i});
    if (outcome == nullptr || !is_timed(*outcome)) continue;
    const std::size_t distance = neighbourhoods_[candidate.group].distance(candidate.config, i);
    if (distance > least) continue;
    if (distance < least) least = distance, sum = count = 0;
    sum += std::log(summarize(outcome->samples).median);
    count += 1;
  }
  return count > 0 ? std::exp(sum / count) : 0;
}

void Search::order(const Results& results, const Standing& standing,
                   std::vector<Candidate>& candidates) const {
  std::map<Candidate, double> costs;
  for (const Candidate& candidate : candidates)
    costs[candidate] = standing.through[candidate.group] - standing.own[candidate.group] +
                       expected_us(results, candidate);
  std::ranges::stable_sort(candidates, {},
                           [&](const Candidate& candidate) { return costs.at(candidate); });
}

}  // namespace wyvern
