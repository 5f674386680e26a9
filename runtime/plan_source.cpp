#include "runtime/plan_source.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "cache/rows.hpp"
#include "runtime/base/fork_guard.hpp"
#include "runtime/nearest_shape.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

/// A list of all winners takes milliseconds; a problem that none serves asks for it again and
/// again.
constexpr auto kFresh = std::chrono::seconds(1);

bool usable(const WinnerRow& row) { return plan_from_json(row.plan).has_value(); }

/// The plan of a winner, nothing where it names templates that this build does not have.
std::optional<PlanChoice> choice_of(const WinnerRow& row, bool exact, const DeviceInfo& device) {
  std::optional<Plan> plan = plan_from_json(row.plan);
  if (!plan) return {};
  // A winner of another driver is still the best that is known, but no longer exact.
  return PlanChoice{std::move(*plan),
                    exact && row.driver == device.driver ? Origin::exact : Origin::nearest};
}

Contender contender(const WinnerRow& row, double distance) {
  return {"user", "", row, distance, false, false};
}

Contender contender(const PackWinner& winner) {
  return {winner.layer, winner.file.string(), winner.row, winner.distance, false, false};
}

}  // namespace

std::vector<Contender> CachePlanSource::contenders(const DeviceInfo& device,
                                                   const ProblemKey& key) {
  std::vector<Contender> all;
  if (const auto row = cache_->find_winner(device.key, key.family, key.tokens, key.sequences))
    all.push_back(contender(*row, 0));
  if (const auto found = packs_->find(device.key, key.family, key.tokens, key.sequences))
    all.push_back(contender(*found));
  std::vector<Contender> near;
  if (const auto row = cache_->nearest_winner(device.key, key.family, key.tokens, key.sequences))
    near.push_back(
        contender(*row, extents_apart(row->tokens, row->sequences, key.tokens, key.sequences)));
  if (const auto found = packs_->nearest(device.key, key.family, key.tokens, key.sequences))
    near.push_back(contender(*found));
  // Distances within rounding of each other are ties.
  if (near.size() == 2 && near[1].distance < near[0].distance - 1e-9) std::swap(near[0], near[1]);
  for (Contender& one : near)
    if (one.distance > 0) all.push_back(std::move(one));
  for (Contender& one : all) one.usable = usable(one.row);

  if (std::ranges::any_of(all, &Contender::usable)) return all;
  if (const auto row = nearest_shape(*winners(), device, key)) {
    const auto distance = shape_distance({row->family, row->tokens, row->sequences}, key);
    all.push_back({"user", "", *row, distance.value_or(0), true, row->family != key.family});
  }
  return all;
}

std::optional<PlanChoice> CachePlanSource::find(const DeviceInfo& device, const ProblemKey& key) {
  // A key that is asked for repeatedly is answered by the first look-up alone.
  if (const auto row = cache_->find_winner(device.key, key.family, key.tokens, key.sequences))
    if (auto choice = choice_of(*row, true, device)) return choice;
  for (const Contender& one : contenders(device, key))
    if (auto choice = choice_of(one.row, one.exact(), device)) return choice;
  return {};
}

/// The winners with usable plans, as of a moment ago. Two threads may both list them.
CachePlanSource::Winners CachePlanSource::winners() {
  const auto now = std::chrono::steady_clock::now();
  {
    const NoFork no_fork;  // its child could not take the mutex
    const Lock lock(mutex_);
    if (winners_ && now - looked_ < kFresh) return winners_;
  }
  std::vector<WinnerRow> rows = cache_->list_winners();
  std::erase_if(rows, [](const WinnerRow& row) { return !usable(row); });
  const auto listed = std::make_shared<const std::vector<WinnerRow>>(std::move(rows));
  const NoFork no_fork;
  const Lock lock(mutex_);
  winners_ = listed;
  looked_ = now;
  return listed;
}

}  // namespace wyvern
