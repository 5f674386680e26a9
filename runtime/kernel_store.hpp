// Loaded kernels of this process: from memory, else from the cache, else compiled.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "cache/cache.hpp"
#include "runtime/operator_impl.hpp"

namespace wyvern {

/// Thread-safe. A kernel found loaded costs a hash look-up under a mutex; what is missing is
/// compiled in parallel, once per process even when several threads ask at the same time.
class KernelStore {
 public:
  KernelStore(std::shared_ptr<Cache> cache, unsigned jobs)
      : cache_(std::move(cache)), jobs_(jobs) {}

  /// Fills in kernel, artifact key and resources of every step.
  void load(OperatorImpl& op);

  std::int64_t compiled() const { return compiled_.load(); }

 private:
  struct Entry {
    std::string artifact_key;
    Resources resources;
    std::shared_ptr<const Kernel> kernel;
  };
  std::optional<Artifact> from_cache(const std::string& key) const;
  void to_cache(const Artifact& artifact);

  std::shared_ptr<Cache> cache_;
  unsigned jobs_;
  std::mutex mutex_;
  std::unordered_map<std::string, Entry> loaded_;
  std::atomic<std::int64_t> compiled_{0};
};

/// An artifact as the cache keeps it, and back.
ArtifactRow to_row(const Artifact& artifact);
std::optional<Artifact> from_row(const ArtifactRow& row);

}  // namespace wyvern
