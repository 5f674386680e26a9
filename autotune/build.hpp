// Compiling candidates on threads of their own, ahead of their turn to be measured.
#pragma once

#include <wyvern/config.hpp>
#include <wyvern/error.hpp>
#include <wyvern/problem.hpp>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cache/cache.hpp"
#include "compiler/compiler.hpp"
#include "runtime/base/mutex.hpp"

namespace wyvern {

/// A kernel to compile: a CompileRequest with its template and target by name.
struct KernelSpec {
  std::string template_id;
  Constants constants;
  Config config;
  auto operator<=>(const KernelSpec&) const = default;
};

struct Built {
  std::string artifact_key;
  Resources resources;
  std::int64_t threads = 1;  ///< per block
  bool compiled = false;     ///< false: it was in the cache
  double compile_ms = 0;     ///< whenever that was
};

/// Turns specs into artifacts in the cache. Thread-safe. Both throw Error.
class Builder {
 public:
  virtual ~Builder() = default;
  virtual std::string key(const KernelSpec& spec) = 0;
  virtual Built build(const KernelSpec& spec) = 0;
};

/// By the compiler, into `cache`; both outlive it.
class CompilingBuilder final : public Builder {
 public:
  CompilingBuilder(Cache& cache, Target target, const Problem& problem)
      : cache_(cache), target_(std::move(target)), problem_(problem) {}
  std::string key(const KernelSpec& spec) override;
  Built build(const KernelSpec& spec) override;

 private:
  CompileRequest request(const KernelSpec& spec) const;

  Cache& cache_;
  Target target_;
  Problem problem_;
};

/// The result of a build: `built`, or the Error's text and kind; kIo for another exception, such as
/// std::bad_alloc.
struct BuildResult {
  std::optional<Built> built;
  std::string error;
  ErrorKind kind = ErrorKind::kCompile;
};

/// Builds, and throws nothing.
BuildResult try_build(Builder& builder, const KernelSpec& spec);

/// The number of compile threads for `jobs`; 0: one a core, but with `overlap` two cores are left
/// to the measurements.
unsigned compile_threads(unsigned jobs, bool overlap);

/// Builds queued specs on compile_threads(jobs, overlap) threads. With `overlap`, at any time.
/// Without, only inside wait(), a batch at a time: on a CPU a compile would use the cores that are
/// being measured. All calls from one thread.
class CompileAhead {
 public:
  CompileAhead(Builder& builder, unsigned jobs, bool overlap);
  ~CompileAhead();
  CompileAhead(const CompileAhead&) = delete;
  CompileAhead& operator=(const CompileAhead&) = delete;

  /// The specs that will be needed, soonest first; replaces the queued specs that were not begun.
  void announce(std::span<const KernelSpec> specs) WYVERN_EXCLUDES(mutex_);
  /// Waits for the spec to be built; nothing when `interrupted` became true first.
  [[nodiscard]] std::optional<BuildResult> wait(const KernelSpec& spec,
                                                const std::function<bool()>& interrupted)
      WYVERN_EXCLUDES(mutex_);
  /// The result of a spec's build, where it is finished.
  [[nodiscard]] std::optional<Built> finished(const KernelSpec& spec) const WYVERN_EXCLUDES(mutex_);
  [[nodiscard]] std::int64_t compiled() const WYVERN_EXCLUDES(mutex_);

 private:
  void work() WYVERN_EXCLUDES(mutex_);
  void work_until_stopped() WYVERN_EXCLUDES(mutex_);
  void allow_batch(const KernelSpec& first) WYVERN_REQUIRES(mutex_);
  bool ready(const KernelSpec& spec) const WYVERN_REQUIRES(mutex_);
  bool may_begin() const WYVERN_REQUIRES(mutex_);

  Builder& builder_;
  const bool overlap_;
  const std::size_t batch_;
  mutable Mutex mutex_;
  Condition wake_, finished_;
  std::deque<KernelSpec> queue_ WYVERN_GUARDED_BY(mutex_);
  std::set<KernelSpec> running_ WYVERN_GUARDED_BY(mutex_);
  std::map<KernelSpec, BuildResult> done_ WYVERN_GUARDED_BY(mutex_);
  /// Builds that may begin, without overlap.
  std::size_t allowance_ WYVERN_GUARDED_BY(mutex_) = 0;
  std::int64_t compiled_ WYVERN_GUARDED_BY(mutex_) = 0;
  bool stopping_ WYVERN_GUARDED_BY(mutex_) = false;
  /// The exception that ended a thread; rethrown to whoever waits for a build.
  std::exception_ptr failure_ WYVERN_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace wyvern
