// Plans from the cache's winners, then from packs, then from a shape alike.
#pragma once

#include <wyvern/runtime.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache.hpp"
#include "cache/packs.hpp"
#include "runtime/base/mutex.hpp"

namespace wyvern {

/// A winner that may answer for a problem.
struct Contender {
  std::string layer;  ///< "user", or the pack layer's name
  std::string file;   ///< of a pack; empty for the user's cache
  WinnerRow row;
  /// Of its extents from the problem's, sum of |log2|; of another shape shape_distance().
  double distance = 0;
  bool usable = false;       ///< its plan names templates of this build
  bool other_shape = false;  ///< not of the problem's family, but of one with the same kernels

  /// Tuned for this very problem, whatever its driver was.
  [[nodiscard]] bool exact() const noexcept { return distance == 0 && !other_shape; }
};

/// Which of the winners answers, the first usable of the contenders. Thread-safe; usable in a child
/// of fork(). `packs` null: the packs of this process.
class CachePlanSource final : public PlanSource {
 public:
  explicit CachePlanSource(std::shared_ptr<Cache> cache, std::shared_ptr<Packs> packs = nullptr)
      : cache_(std::move(cache)), packs_(packs ? std::move(packs) : Packs::shared()) {}
  std::optional<PlanChoice> find(const DeviceInfo& device, const ProblemKey& key) override;
  [[nodiscard]] std::optional<std::uint64_t> version() const noexcept override {
    return Cache::changes();
  }

  /// Every layer's answer to the key, the one to use first in front: winners with exactly its
  /// extents in the order of the layers (user, WYVERN_PACKS, shipped), then the nearest winner of
  /// each layer, by distance and then in the order of the layers; where none of these is usable,
  /// last the winner that nearest_shape() finds among the user's. Empty: no winner is known, and
  /// the default plan answers.
  std::vector<Contender> contenders(const DeviceInfo& device, const ProblemKey& key);

 private:
  using Winners = std::shared_ptr<const std::vector<WinnerRow>>;

  Winners winners() WYVERN_EXCLUDES(mutex_);

  std::shared_ptr<Cache> cache_;
  std::shared_ptr<Packs> packs_;
  Mutex mutex_;
  Winners winners_ WYVERN_GUARDED_BY(mutex_);  ///< usable winners of the user's cache
  std::chrono::steady_clock::time_point looked_ WYVERN_GUARDED_BY(mutex_);
};

}  // namespace wyvern
