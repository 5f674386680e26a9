// Policies for tuning an application's problems: never, elsewhere, before the first use, or in the
// background. The tuner is a function: the tuner of this process (autotune/policy.hpp) or the
// command in a separate process (tuner_command.hpp).
#pragma once

#include <wyvern/runtime.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace wyvern {

enum class TuningPolicy : std::uint8_t {
  off,         ///< the default plan; the cache is not asked
  cached,      ///< the best known plan: Runtime::prepare() alone
  on_miss,     ///< tunes a problem that has no winner of its own first, for the budget
  background,  ///< tunes it on a background thread, and uses the best known plan meanwhile
  fixed,       ///< the best plan of packs, else the default plan; never one tuned on this machine
};

/// A problem to tune, on a device. Valid until the function that got it returns.
struct TuneRequest {
  const Device& device;
  const Problem& problem;
  double budget_s;
  bool meanwhile;  ///< in the background: no caller waits
  /// Call it often, from the calling thread; after true return within two seconds. Takes no lock.
  std::function<bool()> stopping;
};
/// Tunes and stores the winner where the runtime finds it. Returns an error message; empty on
/// success. One thread at a time calls it.
using TuneFunction = std::function<std::string(const TuneRequest&)>;

/// Prepares operators by a policy. Thread-safe. An object tunes each problem key at most once per
/// device, even where that fails, and one problem at a time. A child of fork() does not continue
/// its parent's tunings, and may begin others.
class PolicyRuntime {
 public:
  struct Prepared {
    Operator op;
    /// Becomes true when background tuning has found a winner that this operator does not use:
    /// prepare the problem again then. Null where no tuning will.
    std::shared_ptr<const std::atomic<bool>> outdated;
  };

  /// `runtime` must outlive this object. The thread that tunes calls `failed` with the reason why a
  /// tuning failed; `failed` must not call this object.
  PolicyRuntime(Runtime& runtime, TuneFunction tune,
                std::function<void(const std::string& sentence)> failed);
  ~PolicyRuntime();  ///< stops
  PolicyRuntime(const PolicyRuntime&) = delete;
  PolicyRuntime& operator=(const PolicyRuntime&) = delete;

  /// Throws what Runtime::prepare() throws. A failed tuning is no error: the best known plan is
  /// used then. Do not call it while a graph is captured.
  Prepared prepare(const Device& device, const Problem& problem, TuningPolicy policy,
                   double budget_s);

  /// Compiles the kernels that prepare() would need now, on a background thread; loads none.
  /// Nothing after stop(), nor with on_miss, where a tuning comes first. Of what goes wrong
  /// prepare() says why.
  void compile_ahead(const Device& device, const Problem& problem, TuningPolicy policy);

  /// Waits until all tuning is done, at most `longest`; returns the number of problems left.
  std::size_t wait(std::chrono::duration<double> longest);
  /// Stops the tuning in progress, keeps its measurements, and tunes nothing from then on. Waits
  /// for the plan that compile_ahead() compiles.
  void stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace wyvern
