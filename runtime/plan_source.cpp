#include "runtime/plan_source.hpp"

#include "runtime/nearest_shape.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

/// A list of all winners takes milliseconds; a problem that none serves asks for it again and
/// again.
constexpr auto kFresh = std::chrono::seconds(1);

}  // namespace

std::optional<PlanChoice> CachePlanSource::find(const DeviceInfo& device, const ProblemKey& key) {
  const auto usable = [&](const std::optional<WinnerRow>& row,
                          Origin origin) -> std::optional<PlanChoice> {
    if (!row) return {};
    std::optional<Plan> plan = plan_from_json(row->plan);
    if (!plan) return {};
    // A winner of another driver is still the best that is known, but no longer exact.
    return PlanChoice{std::move(*plan), row->driver == device.driver ? origin : Origin::nearest};
  };
  if (auto choice = usable(cache_->find_winner(device.key, key.family, key.tokens, key.sequences),
                           Origin::exact))
    return choice;
  if (auto choice =
          usable(cache_->nearest_winner(device.key, key.family, key.tokens, key.sequences),
                 Origin::nearest))
    return choice;
  return usable(nearest_shape(winners(), device, key), Origin::nearest);
}

std::vector<WinnerRow> CachePlanSource::winners() {
  const auto now = std::chrono::steady_clock::now();
  const Lock lock(mutex_);
  if (!winners_ || now - looked_ >= kFresh) {
    winners_ = cache_->list_winners();
    looked_ = now;
  }
  return *winners_;
}

}  // namespace wyvern
