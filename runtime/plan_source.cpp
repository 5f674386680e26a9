#include "runtime/plan_source.hpp"

#include <utility>

#include "cache/rows.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

/// The plan of a winner, nothing where it names templates that this build does not have.
std::optional<PlanChoice> choice_of(const WinnerRow& row, bool exact, const DeviceInfo& device) {
  std::optional<Plan> plan = plan_from_json(row.plan);
  if (!plan) return {};
  // A winner of another driver is still the best that is known, but no longer exact.
  return PlanChoice{std::move(*plan),
                    exact && row.driver == device.driver ? Origin::exact : Origin::nearest};
}

Contender contender(const PackWinner& winner) {
  return {winner.layer, winner.file.string(), winner.row, winner.distance, false};
}

}  // namespace

std::vector<Contender> contenders(const Cache& cache, Packs& packs, const DeviceInfo& device,
                                  const ProblemKey& key) {
  std::vector<Contender> all;
  if (const auto row = cache.find_winner(device.key, key.family, key.tokens, key.sequences))
    all.push_back({"user", "", *row, 0, false});
  if (const auto found = packs.find(device.key, key.family, key.tokens, key.sequences))
    all.push_back(contender(*found));
  std::vector<Contender> near;
  if (const auto row = cache.nearest_winner(device.key, key.family, key.tokens, key.sequences))
    near.push_back({"user", "", *row,
                    extents_apart(row->tokens, row->sequences, key.tokens, key.sequences), false});
  if (const auto found = packs.nearest(device.key, key.family, key.tokens, key.sequences))
    near.push_back(contender(*found));
  // Distances within rounding of each other are ties.
  if (near.size() == 2 && near[1].distance < near[0].distance - 1e-9) std::swap(near[0], near[1]);
  for (Contender& one : near)
    if (one.distance > 0) all.push_back(std::move(one));
  for (Contender& one : all) one.usable = plan_from_json(one.row.plan).has_value();
  return all;
}

std::optional<PlanChoice> CachePlanSource::find(const DeviceInfo& device, const ProblemKey& key) {
  // What is asked for again and again is answered by the first look-up alone.
  if (const auto row = cache_->find_winner(device.key, key.family, key.tokens, key.sequences))
    if (auto choice = choice_of(*row, true, device)) return choice;
  for (const Contender& one : contenders(*cache_, *packs_, device, key))
    if (auto choice = choice_of(one.row, one.distance == 0, device)) return choice;
  return {};
}

}  // namespace wyvern
