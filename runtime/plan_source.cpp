#include "runtime/plan_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "cache/rows.hpp"
#include "runtime/base/fork_guard.hpp"
#include "runtime/nearest_shape.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

/// Listing thousands of winners takes milliseconds; a problem without a usable one would list them
/// each time.
constexpr auto kFresh = std::chrono::seconds(1);
/// Added to a distance for another GPU of the architecture: as much as an option of the inputs.
constexpr double kAnotherGpu = 0.5;

/// The prefix of families of the operator and pass: "kda/forward/".
std::string_view operator_and_pass(std::string_view family) {
  return family.substr(0, family.find('/', family.find('/') + 1) + 1);
}

ProblemKey key_of(const WinnerRow& row) { return {row.family, row.tokens, row.sequences}; }

bool same_problem(const WinnerRow& a, const WinnerRow& b) {
  const auto key = [](const WinnerRow& row) {
    return std::tie(row.device, row.family, row.tokens, row.sequences);
  };
  return key(a) == key(b);
}

/// The winner's plan; nothing where it cannot serve, with the reason in `problem`.
std::optional<Plan> plan_of(const WinnerRow& row, const PlanCheck& check, std::string& problem) {
  std::optional<Plan> plan = plan_from_json(row.plan);
  problem = !plan ? "it names templates that this build does not have" : check ? check(*plan) : "";
  if (!problem.empty()) plan.reset();
  return plan;
}

}  // namespace

/// The winners of an operator and pass on a device and its like, as of a moment ago.
struct CachePlanSource::Known {
  struct Winner {
    Ranked ranked;
    TunedFor tuned_for;
  };

  std::vector<WinnerRow> rows;
  Packs::Winners packs;
  std::vector<Winner> winners;  ///< those of one problem and layer in a row, best first
  std::chrono::steady_clock::time_point listed;
  std::uint64_t changes = 0;  ///< Cache::changes() before they were listed
  /// By problem; guarded by the source's mutex_.
  std::unordered_map<std::string, std::shared_ptr<const std::vector<Ranked>>> rankings;
};

std::optional<PlanChoice> CachePlanSource::find(const DeviceInfo& device, const ProblemKey& key,
                                                const PlanCheck& check) {
  PlanChoice choice;
  std::string passed_over;
  bool passed_exact = false;
  std::unordered_set<std::string> tried;
  visit(device, key, [&](const Ranked& one) {
    if (!tried.insert(one.row->plan).second) return true;
    std::string problem;
    if (std::optional<Plan> plan = plan_of(*one.row, check, problem)) {
      // A winner of another driver is still the best known one, but no longer exact.
      const bool exact = one.kinship == Kinship::exact && one.row->driver == device.driver;
      choice.plan = std::move(*plan);
      choice.origin = exact ? Origin::exact : Origin::nearest;
      return false;
    }
    if (passed_over.empty()) {
      passed_over = fmt::format("the plan tuned for {} on {} cannot be used ({})",
                                key_of(*one.row).to_string(), one.row->device, problem);
      passed_exact = one.kinship == Kinship::exact;
    }
    return tried.size() < kMostTried;
  });
  const bool none = choice.origin == Origin::fallback;
  if (none && passed_over.empty()) return {};
  // That a neighbour's plan was refused matters only if no other is used.
  if (none || passed_exact) choice.passed_over = std::move(passed_over);
  return choice;
}

std::vector<Contender> CachePlanSource::contenders(const DeviceInfo& device, const ProblemKey& key,
                                                   const PlanCheck& check) {
  std::vector<Contender> all;
  std::unordered_set<std::string> tried;
  std::unordered_set<std::size_t> layers;
  bool answered = false;
  visit(device, key, [&](const Ranked& one) {
    if (!answered && !tried.insert(one.row->plan).second) return true;
    const bool first = layers.insert(one.layer).second;
    if (answered && !first) return layers.size() <= packs_->layers().size();
    Contender contender{one.layer == 0 ? "user" : packs_->layers()[one.layer - 1].name,
                        one.file == nullptr ? "" : one.file->string(),
                        *one.row,
                        one.kinship,
                        one.distance,
                        {},
                        false};
    plan_of(*one.row, check, contender.problem);
    contender.answers = !answered && contender.problem.empty();
    answered = answered || contender.answers;
    all.push_back(std::move(contender));
    return answered || tried.size() < kMostTried;
  });
  return all;
}

/// Calls `visit` for every contender, in order.
void CachePlanSource::visit(const DeviceInfo& device, const ProblemKey& key, const Visit& visit) {
  // The user's own winners are looked up anew: another process may have tuned just now. A key that
  // has them is answered without the others, and nearly always by the first.
  const auto first = cache_ == nullptr
                         ? std::nullopt
                         : cache_->find_winner(device.key, key.family, key.tokens, key.sequences);
  if (first) {
    if (!visit({&*first, nullptr, 0, Kinship::exact, 0, 0})) return;
    for (const WinnerRow& row :
         cache_->find_winners(device.key, key.family, key.tokens, key.sequences))
      if (row.id != first->id && !visit({&row, nullptr, 0, Kinship::exact, 0, 0})) return;
  }
  const std::shared_ptr<Known> known = this->known(device, key);
  const auto ranked = ranking(*known, device, key);
  for (const Ranked& one : *ranked)
    if (!visit(one)) return;
}

/// Two threads may both list them.
std::shared_ptr<CachePlanSource::Known> CachePlanSource::known(const DeviceInfo& device,
                                                               const ProblemKey& key) {
  const std::string_view prefix = operator_and_pass(key.family);
  const std::string name = fmt::format("{}\n{}", device.key, prefix);
  const auto now = std::chrono::steady_clock::now();
  const std::uint64_t changes = Cache::changes();
  {
    const NoFork no_fork;  // its child could not take the mutex
    const Lock lock(mutex_);
    const auto found = known_.find(name);
    if (found != known_.end() && found->second->changes == changes &&
        now - found->second->listed < kFresh)
      return found->second;
  }
  const auto made = std::make_shared<Known>();
  made->listed = now;
  made->changes = changes;
  if (cache_ != nullptr) made->rows = cache_->winners_of(prefix);
  made->packs = packs_->winners_of(device.key, prefix);
  const std::string_view model = device_parts(device.key).model;
  for (const WinnerRow& row : made->rows)
    if (device_parts(row.device).model == model)
      made->winners.push_back({{&row}, TunedFor(row.device, key_of(row))});
  for (const PackWinner& one : *made->packs)
    made->winners.push_back(
        {{.row = &one.row, .file = &one.file, .layer = 1 + one.layer, .stand_in = one.stand_in},
         TunedFor(one.stand_in ? device.key : one.row.device, key_of(one.row))});
  const NoFork no_fork;
  const Lock lock(mutex_);
  known_[name] = made;
  return made;
}

/// The contenders for a problem but the user's exact ones, in order.
std::shared_ptr<const std::vector<CachePlanSource::Ranked>> CachePlanSource::ranking(
    Known& known, const DeviceInfo& device, const ProblemKey& key) {
  const std::string name = key.to_string();
  {
    const NoFork no_fork;
    const Lock lock(mutex_);
    const auto found = known.rankings.find(name);
    if (found != known.rankings.end()) return found->second;
  }
  const auto made = std::make_shared<std::vector<Ranked>>();
  const TunedFor wanted(device.key, key);
  double gain = 0;
  const Known::Winner* before = nullptr;
  for (const Known::Winner& winner : known.winners) {
    Ranked one = winner.ranked;
    const WinnerRow& row = *one.row;
    // Winners of one problem have its first one's place.
    if (before == nullptr || before->ranked.layer != one.layer ||
        !same_problem(*before->ranked.row, row))
      gain = 1 - rank_of(row);
    before = &winner;
    one.gain = gain;
    auto distance = tuning_distance(wanted, winner.tuned_for);
    if (!distance) continue;
    if (one.stand_in) *distance += kAnotherGpu;
    // In steps, so that distances within rounding of each other are ties.
    one.distance = std::round(*distance * 1e6) / 1e6;
    const bool own = row.device == device.key && row.family == key.family;
    const bool exact = own && row.tokens == key.tokens && row.sequences == key.sequences;
    if (exact && one.layer == 0) continue;
    one.kinship = exact ? Kinship::exact : own ? Kinship::extents : Kinship::kernels;
    if (!own && !carries_over(rank_of(row), one.distance)) continue;
    made->push_back(one);
  }
  std::ranges::stable_sort(*made, [](const Ranked& a, const Ranked& b) {
    if (a.kinship != b.kinship) return a.kinship < b.kinship;
    if (a.distance != b.distance) return a.distance < b.distance;
    return a.layer != b.layer ? a.layer < b.layer : a.gain > b.gain;
  });
  const NoFork no_fork;
  const Lock lock(mutex_);
  known.rankings[name] = made;
  return made;
}

}  // namespace wyvern
