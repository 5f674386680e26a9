// Loaded kernels of this process: from memory, else from the cache, else compiled.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/cache.hpp"
#include "cache/mutex.hpp"
#include "compiler/compiler.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/operator_impl.hpp"

namespace wyvern {

/// Thread-safe. A kernel found loaded costs a hash look-up under a mutex, which nobody holds for
/// longer than that. What is missing is compiled in parallel, once even when several threads or
/// processes that share a cache ask at the same time; who needs a kernel that another thread has
/// begun waits for it, and nobody else does.
class KernelStore {
 public:
  KernelStore(std::shared_ptr<Cache> cache, unsigned jobs)
      : cache_(std::move(cache)), jobs_(jobs) {}

  /// Fills in kernel, artifact key and resources of every step. Throws the Error of the first step
  /// whose kernel could not be made, whichever thread tried; the next call tries again.
  void load(OperatorImpl& op) WYVERN_EXCLUDES(mutex_);

  [[nodiscard]] std::int64_t compiled() const { return compiled_.load(); }

 private:
  struct Entry {
    std::string artifact_key;
    Resources resources;
    std::shared_ptr<const Kernel> kernel;
  };
  using Future = std::shared_future<Entry>;
  /// A kernel that this thread has to make, for a step that needs it.
  struct Task {
    std::string local_key;
    const BoundStep* step = nullptr;
    std::promise<Entry> promise{};
    bool settled = false;
    CompileRequest request{};
    std::string artifact_key{};
  };

  std::vector<Future> futures_of(const OperatorImpl& op, std::vector<Task>& tasks)
      WYVERN_EXCLUDES(mutex_);
  void make(DeviceImpl& device, std::vector<Task>& tasks);
  template <class Attempt>
  void settle(Task& task, Attempt&& attempt);
  void fail(Task& task, std::exception_ptr error) WYVERN_EXCLUDES(mutex_);
  std::optional<Entry> from_cache(DeviceImpl& device, const Task& task);
  Entry compiled_once(DeviceImpl& device, const Task& task);

  std::shared_ptr<Cache> cache_;
  unsigned jobs_;
  Mutex mutex_;
  /// By local_key(): what is loaded, and what some thread is making. What failed is taken out.
  std::unordered_map<std::string, Future> kernels_ WYVERN_GUARDED_BY(mutex_);
  std::atomic<std::int64_t> compiled_{0};
};

/// An artifact as the cache keeps it, and back.
[[nodiscard]] ArtifactRow to_row(const Artifact& artifact);
[[nodiscard]] std::optional<Artifact> from_row(const ArtifactRow& row);

}  // namespace wyvern
