// When an application's problems are tuned: never, by others, before their first use, or meanwhile.
#pragma once

#include <wyvern/runtime.hpp>

#include <memory>

#include "autotune/tuner.hpp"

namespace wyvern {

enum class TuningPolicy : std::uint8_t {
  off,         ///< the default plan, whatever the cache holds
  cached,      ///< the best plan known: Runtime::prepare() as it is
  on_miss,     ///< a problem without a winner of its own is tuned first, which takes the budget
  background,  ///< the same on a thread of this object, while the best plan known is used
};

/// Prepares operators by a policy. Thread-safe. Each problem is tuned once at most in the life of
/// this object, also where that fails; several at the same time one after the other. With
/// `background` tunings take the device and cores from the application: its own times rise
/// meanwhile, and what is measured is what a busy device does.
class TuningRuntime {
 public:
  /// `runtime` outlives it. `options.worker_command` must be given but for off and cached;
  /// `options.interrupted` and `options.progress` are called from the thread that tunes.
  TuningRuntime(Runtime& runtime, TuningPolicy policy, TuneOptions options);
  /// Stops what is being tuned: what was measured is kept.
  ~TuningRuntime();
  TuningRuntime(const TuningRuntime&) = delete;
  TuningRuntime& operator=(const TuningRuntime&) = delete;

  /// Throws what Runtime::prepare() throws. A tuning that fails is no error: the best plan known is
  /// used then, and last_failure() says why. Not to be called while a graph is
  /// captured.
  Operator prepare(const Device& device, const Problem& problem);

  /// Waits until nothing is left to tune.
  void wait();
  /// Why the last tuning failed; empty where none has.
  [[nodiscard]] std::string last_failure() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace wyvern
