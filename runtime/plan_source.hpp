// Finds plans among winners of the cache and of packs: of the problem itself, else of a near one.
#pragma once

#include <wyvern/runtime.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache.hpp"
#include "cache/packs.hpp"
#include "runtime/base/mutex.hpp"

namespace wyvern {

/// How a tuned problem differs from the requested one. Lesser values come first.
enum class Kinship : std::uint8_t {
  exact,    ///< the same problem, under any driver
  extents,  ///< other tokens or sequences only
  kernels,  ///< other heads, fields that have a distance, threads or GPU too: its plan must
            ///< carry_over()
};

/// A winner whose plan may serve the requested problem.
struct Contender {
  std::string layer;  ///< "user", or the pack layer's name
  std::string file;   ///< the pack's file; empty for the user's cache
  WinnerRow row;
  Kinship kinship = Kinship::exact;
  double distance = 0;   ///< tuning_distance()
  std::string problem;   ///< why its plan is not legal; empty: it is
  bool answers = false;  ///< true for the first legal one, which find() returns
};

/// Returns the first winner whose plan names templates of this build and passes the caller's check,
/// in this order:
///
/// 1. Kinship::exact, by layer: the user's cache, WYVERN_PACKS, shipped
/// 2. Kinship::extents, by distance, then by layer
/// 3. Kinship::kernels, by distance, then by layer, of those that carry_over()
///
/// Among equals the one with the largest gain comes first; several winners of one problem keep the
/// order of their cache or layer. Tries at most kMostTried different plans. Thread-safe; usable in
/// a child of fork(). A null `cache` means packs only, a null `packs` the packs of this process.
class CachePlanSource final : public PlanSource {
 public:
  static constexpr std::size_t kMostTried = 32;

  explicit CachePlanSource(std::shared_ptr<Cache> cache, std::shared_ptr<Packs> packs = nullptr)
      : cache_(std::move(cache)), packs_(packs ? std::move(packs) : Packs::shared()) {}
  std::optional<PlanChoice> find(const DeviceInfo& device, const ProblemKey& key,
                                 const PlanCheck& check) override;
  [[nodiscard]] std::optional<std::uint64_t> version() const noexcept override {
    return Cache::changes();
  }

  /// In order: the contenders that find() passes over, the one that it returns, and the first of
  /// every layer that has none among these. Empty: no near winner is known.
  std::vector<Contender> contenders(const DeviceInfo& device, const ProblemKey& key,
                                    const PlanCheck& check);

 private:
  /// A winner and what ranks it; `row` and `file` live as long as the Known.
  struct Ranked {
    const WinnerRow* row = nullptr;
    const std::filesystem::path* file = nullptr;  ///< null: the user's cache
    std::size_t layer = 0;  ///< 0: the user's cache; else 1 + the layer of packs
    Kinship kinship = Kinship::exact;
    double distance = 0, gain = 0;
    bool stand_in = false;  ///< from another GPU, PackWinner::stand_in
  };
  struct Known;
  using Visit = std::function<bool(const Ranked&)>;  ///< returns false to stop

  void visit(const DeviceInfo& device, const ProblemKey& key, const Visit& visit);
  std::shared_ptr<Known> known(const DeviceInfo& device, const ProblemKey& key)
      WYVERN_EXCLUDES(mutex_);
  std::shared_ptr<const std::vector<Ranked>> ranking(Known& known, const DeviceInfo& device,
                                                     const ProblemKey& key) WYVERN_EXCLUDES(mutex_);

  std::shared_ptr<Cache> cache_;
  std::shared_ptr<Packs> packs_;
  Mutex mutex_;
  /// By device and the prefix of an operator and pass's families.
  std::map<std::string, std::shared_ptr<Known>, std::less<>> known_ WYVERN_GUARDED_BY(mutex_);
};

}  // namespace wyvern
