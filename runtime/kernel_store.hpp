// Loaded kernels of this process: from memory, else from the cache, else compiled.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/cache.hpp"
#include "compiler/compiler.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/operator_impl.hpp"

namespace wyvern {

/// Thread-safe. A kernel found loaded costs a hash look-up under a mutex; what is missing is
/// compiled in parallel, once even when several threads or processes that share a cache ask at the
/// same time.
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
  /// A kernel that is not loaded, and for which step.
  struct Missing {
    std::string local;
    std::string key;
    CompileRequest request;
    const BoundStep* step;
  };
  std::vector<Missing> missing_from(const OperatorImpl& op) const;
  void add(DeviceImpl& device, const Missing& missing, const Artifact& artifact);
  bool add_from_cache(DeviceImpl& device, const Missing& missing);
  void compile(DeviceImpl& device, std::vector<Missing> missing);

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
