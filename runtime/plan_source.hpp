// Plans from the cache's winners, then from packs.
#pragma once

#include <wyvern/runtime.hpp>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache.hpp"
#include "cache/packs.hpp"

namespace wyvern {

/// A winner that may answer for a problem.
struct Contender {
  std::string layer;  ///< "user", or the pack layer's name
  std::string file;   ///< of a pack; empty for the user's cache
  WinnerRow row;
  double distance = 0;  ///< of its extents from the problem's, sum of |log2|; 0: exact
  bool usable = false;  ///< its plan names templates of this build
};

/// Every layer's answer to the key, the one that is used first: what has exactly its extents in the
/// order of the layers (user, WYVERN_PACKS, shipped), then the nearest of each layer, by distance
/// and then in the order of the layers. Empty: nothing is known, and the default plan answers.
std::vector<Contender> contenders(const Cache& cache, Packs& packs, const DeviceInfo& device,
                                  const ProblemKey& key);

/// The first usable of the contenders. Thread-safe. `packs` null: those of this process.
class CachePlanSource final : public PlanSource {
 public:
  explicit CachePlanSource(std::shared_ptr<Cache> cache, std::shared_ptr<Packs> packs = nullptr)
      : cache_(std::move(cache)), packs_(packs ? std::move(packs) : Packs::shared()) {}
  std::optional<PlanChoice> find(const DeviceInfo& device, const ProblemKey& key) override;

 private:
  std::shared_ptr<Cache> cache_;
  std::shared_ptr<Packs> packs_;
};

}  // namespace wyvern
