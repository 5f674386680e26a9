#include "runtime/plan_source.hpp"

#include "runtime/plan.hpp"

namespace wyvern {

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
  return usable(cache_->nearest_winner(device.key, key.family, key.tokens, key.sequences),
                Origin::nearest);
}

}  // namespace wyvern
