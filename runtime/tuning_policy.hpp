// When an application's problems are tuned: never, by others, before their first use, or meanwhile.
// The tuner is plugged in: the one in this process (autotune/policy.hpp) or the command in a
// process of its own (tuner_command.hpp).
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
  off,         ///< the default plan, whatever the cache holds
  cached,      ///< the best plan known: Runtime::prepare() as it is
  on_miss,     ///< a problem without a winner of its own is tuned first, which takes the budget
  background,  ///< the same on a thread of its own, while the best plan known is used
  fixed,       ///< the best plan of packs, else the default one, whatever was tuned here
};

/// A problem to tune, on a device. Valid until the function that got it returns.
struct TuneRequest {
  const Device& device;
  const Problem& problem;
  double budget_s;
  bool meanwhile;  ///< nobody waits for it
  /// Asked often, from the calling thread; true: return within a second or two. Takes no lock.
  std::function<bool()> stopping;
};
/// Tunes and stores the winner where the runtime finds it. Returns why it did not; empty where it
/// did. Called by one thread at a time.
using TuneFunction = std::function<std::string(const TuneRequest&)>;

/// Prepares operators by a policy. Thread-safe. Each problem key is tuned once at most on a device
/// in the life of this object, also where that fails; several one after the other. A child of
/// fork() leaves its parent's tunings to the parent, and may begin others.
class PolicyRuntime {
 public:
  struct Prepared {
    Operator op;
    /// Becomes true when a winner was tuned in the background that this operator is not: prepare it
    /// again then. Null where that will not be.
    std::shared_ptr<const std::atomic<bool>> outdated;
  };

  /// `runtime` outlives it. `failed` is told, from the thread that tuned, why a tuning found
  /// nothing; it calls nothing of this object.
  PolicyRuntime(Runtime& runtime, TuneFunction tune,
                std::function<void(const std::string& sentence)> failed);
  ~PolicyRuntime();  ///< stops
  PolicyRuntime(const PolicyRuntime&) = delete;
  PolicyRuntime& operator=(const PolicyRuntime&) = delete;

  /// Throws what Runtime::prepare() throws. A tuning that fails is no error: the best plan known is
  /// used then. Not to be called while a graph is captured.
  Prepared prepare(const Device& device, const Problem& problem, TuningPolicy policy,
                   double budget_s);

  /// Waits until nothing is left to tune, or as long as is said; returns how many problems are.
  std::size_t wait(std::chrono::duration<double> longest);
  /// Ends the tuning in progress (its measurements are kept) and tunes nothing from now on.
  void stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace wyvern
