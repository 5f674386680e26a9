#include "autotune/search.hpp"

#include <algorithm>

#include "autotune/choose.hpp"

namespace wyvern {
namespace {

/// A local search gains tens of percent on a default, not a factor of two.
constexpr double kHopeless = 2.0;
constexpr double kNegligible = 1.0 / 200;

/// How many tunables two configs of one template differ in.
std::size_t distance(const Config& a, const Config& b) {
  std::size_t count = 0;
  for (const auto& [name, value] : a.items()) {
    const Value* other = b.find(name);
    if (other == nullptr || *other != value) ++count;
  }
  return count;
}

}  // namespace

std::vector<Candidate> Search::next_round(const Results& results) const {
  std::vector<Candidate> round;
  for (std::size_t group = 0; group < space_.groups.size(); ++group) {
    const Candidate first{group, space_.groups[group].default_config};
    if (results.find(first) == nullptr) round.push_back(first);
  }
  if (!round.empty()) return round;
  for (const std::size_t group : groups_by_promise(results))
    for (const Candidate& candidate : neighbours(results, group))
      if (results.find(candidate) == nullptr) round.push_back(candidate);
  return round;
}

std::vector<std::size_t> Search::groups_by_promise(const Results& results) const {
  const std::vector<double> through = costs_through(space_, results);
  const std::vector<RankedPlan> best = best_plans(space_, results, 1);
  std::vector<std::size_t> order;
  for (std::size_t group = 0; group < through.size(); ++group) {
    const double own = results.bar(group);
    const bool matters = best.empty() || (through[group] <= kHopeless * best.front().sum_us &&
                                          (own == 0 || own >= kNegligible * best.front().sum_us));
    if (matters || exhaustive_) order.push_back(group);
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (through[a] != through[b]) return through[a] < through[b];
    return results.bar(a) > results.bar(b);
  });
  return order;
}

std::vector<Candidate> Search::neighbours(const Results& results, std::size_t group) const {
  const Group& own = space_.groups[group];
  const auto best = best_config(space_, results, group);
  const Config& centre = own.configs[best.value_or(own.default_config)];
  std::vector<Candidate> candidates;
  for (std::size_t i = 0; i < own.configs.size(); ++i)
    if (exhaustive_ || !best || distance(own.configs[i], centre) == 1)
      candidates.push_back({group, i});
  const auto nearer = [&](const Candidate& a, const Candidate& b) {
    return distance(own.configs[a.config], centre) < distance(own.configs[b.config], centre);
  };
  std::stable_sort(candidates.begin(), candidates.end(), nearer);
  return candidates;
}

}  // namespace wyvern
