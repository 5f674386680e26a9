// Plans from the cache's winners and from packs: those of the very problem, else of one alike.
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

/// How a tuned problem differs from the one that is asked for. The lesser answers first.
enum class Kinship : std::uint8_t {
  exact,    ///< the very problem, whatever the driver was
  extents,  ///< tokens and sequences alone
  kernels,  ///< heads, crossed_options(), threads or the GPU too: its plan must carry_over()
};

/// A winner that may answer for a problem.
struct Contender {
  std::string layer;  ///< "user", or the pack layer's name
  std::string file;   ///< of a pack; empty for the user's cache
  WinnerRow row;
  Kinship kinship = Kinship::exact;
  double distance = 0;   ///< tuning_distance()
  std::string problem;   ///< why its plan cannot serve; empty: it can
  bool answers = false;  ///< the first that can
};

/// Which of the winners answers: the first whose plan names templates of this build and passes the
/// caller's check. In this order:
///
/// 1. Kinship::exact, by layer: the user's cache, WYVERN_PACKS, shipped
/// 2. Kinship::extents, by distance, then by layer
/// 3. Kinship::kernels, by distance, then by layer, of those that carry_over()
///
/// Of equals the one that gained most answers first; several winners of one problem stand in the
/// order of their cache or layer. At most kMostTried different plans are tried. Thread-safe; usable
/// in a child of fork(). `cache` null: packs alone; `packs` null: the packs of this process.
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

  /// In order: the contenders that are passed over, the one that answers, and of every layer that
  /// has none among these its first. Empty: nothing alike is known, and the default plan answers.
  std::vector<Contender> contenders(const DeviceInfo& device, const ProblemKey& key,
                                    const PlanCheck& check);

 private:
  /// A winner in its place; `row` and `file` live as long as the Known.
  struct Ranked {
    const WinnerRow* row = nullptr;
    const std::filesystem::path* file = nullptr;  ///< null: of the user's cache
    std::size_t layer = 0;                        ///< 0: the user's cache; else 1 + that of packs
    Kinship kinship = Kinship::exact;
    double distance = 0, gain = 0;
    bool stand_in = false;  ///< of another GPU, PackWinner::stand_in
  };
  struct Known;
  using Visit = std::function<bool(const Ranked&)>;  ///< false: it has seen enough

  void visit(const DeviceInfo& device, const ProblemKey& key, const Visit& visit);
  std::shared_ptr<Known> known(const DeviceInfo& device, const ProblemKey& key)
      WYVERN_EXCLUDES(mutex_);
  std::shared_ptr<const std::vector<Ranked>> ranking(Known& known, const DeviceInfo& device,
                                                     const ProblemKey& key) WYVERN_EXCLUDES(mutex_);

  std::shared_ptr<Cache> cache_;
  std::shared_ptr<Packs> packs_;
  Mutex mutex_;
  /// By device and what families of an operator and pass begin with.
  std::map<std::string, std::shared_ptr<Known>, std::less<>> known_ WYVERN_GUARDED_BY(mutex_);
};

}  // namespace wyvern
