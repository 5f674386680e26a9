// Plans from the cache's winners.
#pragma once

#include <wyvern/runtime.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "cache/cache.hpp"
#include "cache/mutex.hpp"

namespace wyvern {

/// The winner tuned for the key, else the nearest of its family, else that of the nearest shape
/// whose kernels are the same (nearest_shape.hpp); winners whose templates this build
/// does not have are passed over. Thread-safe.
class CachePlanSource final : public PlanSource {
 public:
  explicit CachePlanSource(std::shared_ptr<Cache> cache) : cache_(std::move(cache)) {}
  std::optional<PlanChoice> find(const DeviceInfo& device, const ProblemKey& key) override;

 private:
  std::vector<WinnerRow> winners() WYVERN_EXCLUDES(mutex_);

  std::shared_ptr<Cache> cache_;
  Mutex mutex_;
  std::optional<std::vector<WinnerRow>> winners_ WYVERN_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point looked_ WYVERN_GUARDED_BY(mutex_);
};

}  // namespace wyvern
