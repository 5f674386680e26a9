#include "autotune/policy.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <deque>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "cache/mutex.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"

namespace wyvern {

class TuningRuntime::Impl {
 public:
  Impl(Runtime& runtime, TuningPolicy policy, TuneOptions options)
      : runtime_(runtime), policy_(policy), options_(std::move(options)) {
    const std::function<bool()> asked = options_.interrupted;
    options_.interrupted = [this, asked] { return stopping() || (asked && asked()); };
    if (policy_ == TuningPolicy::background) thread_ = std::thread([this] { work(); });
  }

  ~Impl() {
    {
      const Lock lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Operator prepare(const Device& device, const Problem& problem) {
    if (policy_ == TuningPolicy::off) {
      validate(problem);
      return runtime_.prepare(device, problem, default_plan(problem, device.impl().target()));
    }
    Operator op = runtime_.prepare(device, problem);
    const bool tunable = problem.B * problem.T > 0 && op.origin() != Origin::exact;
    if (policy_ == TuningPolicy::cached || !tunable) return op;
    if (policy_ == TuningPolicy::background) {
      enqueue(device, problem);
      return op;
    }
    const Lock one_at_a_time(tuning_);
    if (!is_new(device, problem)) return runtime_.prepare(device, problem);
    tune_one(device, problem);
    return runtime_.prepare(device, problem);
  }

  void wait() WYVERN_EXCLUDES(mutex_) {
    Lock lock(mutex_);
    while (!queue_.empty() || busy_) changed_.wait(lock);
  }

  std::string last_failure() const WYVERN_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    return last_failure_;
  }

 private:
  bool stopping() const WYVERN_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    return stopping_;
  }

  /// Whether the problem was not asked for before; it has been now.
  bool is_new(const Device& device, const Problem& problem) WYVERN_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    return seen_
        .insert(fmt::format("{} {} {}x{}", device.info().name, problem_key(problem).to_string(),
                            problem.B, problem.T))
        .second;
  }

  void enqueue(const Device& device, const Problem& problem) {
    if (!is_new(device, problem)) return;
    {
      const Lock lock(mutex_);
      queue_.emplace_back(device, problem);
    }
    changed_.notify_all();
  }

  void tune_one(const Device& device, const Problem& problem) WYVERN_EXCLUDES(mutex_) {
    std::string failure;
    try {
      const TuneResult result = tune(runtime_, device, problem, options_);
      if (result.interrupted) failure = "it was interrupted";
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (failure.empty()) return;
    const Lock lock(mutex_);
    last_failure_ = fmt::format("{} was not tuned on {}: {}", problem_key(problem).to_string(),
                                device.info().name, failure);
  }

  void work() WYVERN_EXCLUDES(mutex_) {
    Lock lock(mutex_);
    for (;;) {
      while (!stopping_ && queue_.empty()) changed_.wait(lock);
      if (stopping_) return;
      const auto [device, problem] = queue_.front();
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      tune_one(device, problem);
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  Runtime& runtime_;
  const TuningPolicy policy_;
  TuneOptions options_;
  Mutex tuning_;  ///< held by who tunes on a miss
  mutable Mutex mutex_;
  Condition changed_;
  std::deque<std::pair<Device, Problem>> queue_ WYVERN_GUARDED_BY(mutex_);
  std::set<std::string> seen_ WYVERN_GUARDED_BY(mutex_);
  std::string last_failure_ WYVERN_GUARDED_BY(mutex_);
  bool busy_ WYVERN_GUARDED_BY(mutex_) = false;
  bool stopping_ WYVERN_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

TuningRuntime::TuningRuntime(Runtime& runtime, TuningPolicy policy, TuneOptions options)
    : impl_(std::make_unique<Impl>(runtime, policy, std::move(options))) {}
TuningRuntime::~TuningRuntime() = default;

Operator TuningRuntime::prepare(const Device& device, const Problem& problem) {
  return impl_->prepare(device, problem);
}
void TuningRuntime::wait() { impl_->wait(); }
std::string TuningRuntime::last_failure() const { return impl_->last_failure(); }

}  // namespace wyvern
