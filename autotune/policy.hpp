// The policies of runtime/tuning_policy.hpp with the tuner in this process.
#pragma once

#include <wyvern/runtime.hpp>

#include <memory>
#include <string>

#include "autotune/tuner.hpp"
#include "runtime/tuning_policy.hpp"

namespace wyvern {

/// Prepares operators by a policy. Thread-safe. An object tunes each problem key at most once per
/// device, even if that fails, and one problem at a time. With `background` tunings share the
/// device and cores with the application: its own times rise meanwhile, and the measurements are
/// those of a busy device.
class TuningRuntime {
 public:
  /// `runtime` outlives it. `options.worker_command` must be given but for off and cached;
  /// `options.interrupted` and `options.progress` are called from the thread that tunes.
  TuningRuntime(Runtime& runtime, TuningPolicy policy, TuneOptions options);
  /// Stops the tuning in progress; its measurements stay stored.
  ~TuningRuntime();
  TuningRuntime(const TuningRuntime&) = delete;
  TuningRuntime& operator=(const TuningRuntime&) = delete;

  /// Throws what Runtime::prepare() throws. A failed tuning is no error: the best plan known is
  /// used then, and last_failure() says why. Do not call it while a graph is captured.
  Operator prepare(const Device& device, const Problem& problem);

  /// Waits until all tuning is done.
  void wait();
  /// Why the last tuning failed; empty where none has.
  [[nodiscard]] std::string last_failure() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace wyvern
