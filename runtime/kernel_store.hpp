// Loads kernels: from memory, else from shipped code, else from the cache, else compiles them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/cache.hpp"
#include "cache/shipped_code.hpp"
#include "compiler/compiler.hpp"
#include "runtime/base/mutex.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/operator_impl.hpp"

namespace wyvern {

/// Thread-safe. A loaded kernel costs a hash look-up under a mutex, which no thread holds longer
/// than that. Missing kernels compile in parallel, each once even when several threads, or
/// processes that share a cache, need it at the same time. A thread waits for another one's
/// compilation only where it needs that kernel.
class KernelStore {
 public:
  /// How long one load() waits in all for other processes that have claimed its kernels. Compiling
  /// an operator takes less, so a longer wait means that the owner hangs.
  static constexpr std::chrono::milliseconds kPatience{20000};
  /// The wait after such a wait was in vain, until a claim succeeds again.
  static constexpr std::chrono::milliseconds kShortPatience{20};

  KernelStore(std::shared_ptr<Cache> cache, unsigned jobs,
              std::chrono::milliseconds patience = kPatience,
              std::shared_ptr<const ShippedCode> shipped = ShippedCode::shared())
      : cache_(std::move(cache)), shipped_(std::move(shipped)), jobs_(jobs), patience_(patience) {}

  /// Sets kernel, artifact key and resources of every step. Compiles a kernel that another process
  /// has claimed for too long. Throws the Error of the first step whose kernel could not be made,
  /// by whichever thread; the next call tries again.
  void load(OperatorImpl& op) WYVERN_EXCLUDES(mutex_);

  /// Compiles into the cache the kernels that load() would compile, and loads none: it does not
  /// call the driver, so other threads may capture graphs. A load() meanwhile waits for those it
  /// needs. A kernel that does not compile is no error here.
  void compile_ahead(const OperatorImpl& op) WYVERN_EXCLUDES(mutex_);

  [[nodiscard]] std::int64_t compiled() const { return compiled_.load(); }
  /// How long its threads have slept in total while other processes held claims.
  [[nodiscard]] std::chrono::milliseconds slept() const {
    return std::chrono::milliseconds(slept_ms_.load());
  }

 private:
  struct Entry {
    std::string artifact_key;
    Resources resources;
    std::shared_ptr<const Kernel> kernel;
  };
  using Future = std::shared_future<Entry>;
  using Time = std::chrono::steady_clock::time_point;
  /// A kernel that this thread must make, and the step that needs it.
  struct Task {
    std::string local_key;
    const BoundStep* step = nullptr;
    std::promise<Entry> promise{};
    bool settled = false;
    CompileRequest request{};
    std::string artifact_key{};
  };

  /// A kernel of compile_ahead(). Its result is null where the cache has it, or nobody.
  using Ahead = std::shared_future<std::shared_ptr<const Artifact>>;
  struct AheadTask {
    CompileRequest request;
    std::string artifact_key;
    std::promise<std::shared_ptr<const Artifact>> promise{};
  };

  std::vector<Future> futures_of(const OperatorImpl& op, std::vector<Task>& tasks)
      WYVERN_EXCLUDES(mutex_);
  void make(DeviceImpl& device, std::vector<Task>& tasks);
  template <class Attempt>
  void settle(Task& task, Attempt&& attempt);
  void fail(Task& task, std::exception_ptr error) WYVERN_EXCLUDES(mutex_);
  std::optional<Entry> from_row(DeviceImpl& device, const Task& task,
                                const std::optional<ArtifactRow>& row);
  std::optional<Entry> from_shipped(DeviceImpl& device, const Task& task);
  std::optional<Entry> from_cache(DeviceImpl& device, const Task& task);
  [[nodiscard]] Time give_up_time() const;
  ArtifactClaim claim_of(const std::string& artifact_key, Time give_up);
  bool compile_and_store(const CompileRequest& request, Artifact& artifact);
  std::vector<AheadTask> ahead_tasks(const OperatorImpl& op) WYVERN_EXCLUDES(mutex_);
  std::shared_ptr<const Artifact> compiled_ahead(AheadTask& task, Time give_up);
  std::shared_ptr<const Artifact> take_ahead(const std::string& artifact_key)
      WYVERN_EXCLUDES(mutex_);
  Entry compiled_once(DeviceImpl& device, const Task& task, Time give_up);

  std::shared_ptr<Cache> cache_;
  std::shared_ptr<const ShippedCode> shipped_;
  unsigned jobs_;
  const std::chrono::milliseconds patience_;
  Mutex mutex_;
  /// The kernels that are loaded or being made, by local_key(). Failed ones are removed.
  std::unordered_map<std::string, Future> kernels_ WYVERN_GUARDED_BY(mutex_);
  /// By artifact key, until the cache has it or a load() has taken it.
  std::unordered_map<std::string, Ahead> ahead_ WYVERN_GUARDED_BY(mutex_);
  std::atomic<std::int64_t> compiled_{0};
  std::atomic<std::int64_t> slept_ms_{0};
  /// Whether the last wait for a claim was in vain.
  std::atomic<bool> in_vain_{false};
};

/// Convert between an artifact and its row in the cache.
[[nodiscard]] ArtifactRow to_row(const Artifact& artifact);
[[nodiscard]] std::optional<Artifact> from_row(const ArtifactRow& row);

}  // namespace wyvern
