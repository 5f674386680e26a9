// Plans from the cache's winners.
#pragma once

#include <wyvern/runtime.hpp>

#include <memory>

#include "cache/cache.hpp"

namespace wyvern {

/// The winner tuned for the key, else the nearest of its family; winners whose templates this build
/// does not have are passed over. Thread-safe.
class CachePlanSource final : public PlanSource {
 public:
  explicit CachePlanSource(std::shared_ptr<Cache> cache) : cache_(std::move(cache)) {}
  std::optional<PlanChoice> find(const DeviceInfo& device, const ProblemKey& key) override;

 private:
  std::shared_ptr<Cache> cache_;
};

}  // namespace wyvern
