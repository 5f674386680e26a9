#include "runtime/tuning_policy.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <deque>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "cache/cache.hpp"
#include "runtime/base/fork_guard.hpp"
#include "runtime/base/mutex.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "runtime/plan_source.hpp"

namespace wyvern {
namespace {

using Clock = std::chrono::steady_clock;

/// A problem that was requested on a device, from then on.
struct Tuning {
  Tuning(Device on, Problem what, double budget)
      : device(std::move(on)), problem(std::move(what)), budget_s(budget) {}
  const Device device;
  const Problem problem;
  const double budget_s;
  bool ended = false;  ///< with or without success; guarded by the mutex of Impl
  std::atomic<bool> tuned{false};
};

/// Knows no plan, so that the default plan is taken.
class DefaultPlanSource final : public PlanSource {
 public:
  std::optional<PlanChoice> find(const DeviceInfo&, const ProblemKey&, const PlanCheck&) override {
    return {};
  }
};

/// Signals are for the application's threads: a handler may expect to run in one of them.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

class PolicyRuntime::Impl {
 public:
  Impl(Runtime& runtime, TuneFunction tune, std::function<void(const std::string&)> failed)
      : runtime_(runtime), tune_(std::move(tune)), failed_(std::move(failed)) {
    ForkGuard::instance().add(mutex_);
  }
  ~Impl() {
    stop();
    ForkGuard::instance().remove(mutex_);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Prepared prepare(const Device& device, const Problem& problem, TuningPolicy policy,
                   double budget_s) {
    if (policy == TuningPolicy::off) {
      validate(problem);
      return {runtime_.prepare(device, problem, default_plan(problem, device.impl().target())),
              nullptr};
    }
    if (policy == TuningPolicy::fixed) return {runtime_.prepare(device, problem, packs_), nullptr};
    Operator op = runtime_.prepare(device, problem);
    const bool tunable =
        problem.B * problem.T > 0 && !problem.batch_invariant && op.origin() != Origin::exact;
    if (policy == TuningPolicy::cached || !tunable) return {std::move(op), nullptr};
    if (policy == TuningPolicy::background) {
      std::shared_ptr<Tuning> tuning = enqueue(device, problem, budget_s);
      if (tuning == nullptr) return {std::move(op), nullptr};
      // It may have ended since the operator was prepared.
      if (tuning->tuned) return {runtime_.prepare(device, problem), nullptr};
      const std::atomic<bool>* const outdated = &tuning->tuned;
      return {std::move(op), {std::move(tuning), outdated}};
    }
    tune_now(device, problem, budget_s);
    return {runtime_.prepare(device, problem), nullptr};
  }

  void compile_ahead(const Device& device, const Problem& problem, TuningPolicy policy)
      WYVERN_EXCLUDES(mutex_) {
    if (policy == TuningPolicy::on_miss) return;
    const Lock lock(mutex_);
    check_for_fork();
    if (stopping_) return;
    ahead_.push_back([this, device, problem, policy] {
      DefaultPlanSource defaults;
      if (policy == TuningPolicy::off) return runtime_.compile_ahead(device, problem, defaults);
      if (policy == TuningPolicy::fixed) return runtime_.compile_ahead(device, problem, packs_);
      runtime_.compile_ahead(device, problem);
    });
    if (compiling_) return;
    if (compiler_) compiler_->join();  // it has nothing left to do
    try {
      compiler_ = std::make_unique<std::thread>([this] { compile_all_ahead(); });
      compiling_ = true;
    } catch (const std::system_error&) {  // no thread: prepare() compiles
      compiler_ = nullptr;
      ahead_.clear();
    }
  }

  std::size_t wait(std::chrono::duration<double> longest) WYVERN_EXCLUDES(mutex_) {
    constexpr double kYear = 3e7;
    const auto deadline =
        Clock::now() + std::chrono::duration<double>(std::min(longest.count(), kYear));
    Lock lock(mutex_);
    check_for_fork();
    while (left() != 0 && !stopping_ && Clock::now() < deadline) {
      const auto nap = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      changed_->wait_for(lock, nap);
    }
    return left();
  }

  void stop() WYVERN_EXCLUDES(mutex_) {
    std::unique_ptr<std::thread> thread, compiler;
    {
      const Lock lock(mutex_);
      check_for_fork();
      stopping_ = true;
      queue_.clear();
      ahead_.clear();
      thread = std::move(thread_);
      compiler = std::move(compiler_);
    }
    changed_->notify_all();
    if (thread) thread->join();
    if (compiler) compiler->join();
  }

 private:
  std::size_t left() const WYVERN_REQUIRES(mutex_) { return queue_.size() + (busy_ ? 1 : 0); }

  /// A child of fork() has none of its parent's threads: their tunings remain the parent's, and
  /// their wait objects are abandoned.
  void check_for_fork() WYVERN_REQUIRES(mutex_) {
    if (pid_ == ::getpid()) return;
    pid_ = ::getpid();
    for (const auto& [name, tuning] : known_) tuning->ended = true;
    queue_.clear();
    busy_ = false;
    ahead_.clear();
    compiling_ = false;
    // Their destructors would wait for these threads.
    [[maybe_unused]] const std::thread* const thread = thread_.release();
    [[maybe_unused]] const std::thread* const compiler = compiler_.release();
    [[maybe_unused]] const Condition* const changed = changed_.release();
    changed_ = std::make_unique<Condition>();
  }

  std::shared_ptr<Tuning>& known(const Device& device, const Problem& problem)
      WYVERN_REQUIRES(mutex_) {
    return known_[fmt::format("{} {}", device.info().name, problem_key(problem).to_string())];
  }

  /// The problem's tuning, which will be or has been successful; null where there is none.
  std::shared_ptr<Tuning> enqueue(const Device& device, const Problem& problem, double budget_s)
      WYVERN_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    check_for_fork();
    if (stopping_) return nullptr;
    std::shared_ptr<Tuning>& tuning = known(device, problem);
    if (tuning == nullptr) {
      tuning = std::make_shared<Tuning>(device, problem, budget_s);
      tuning->ended = !start_thread();
      if (!tuning->ended) queue_.push_back(tuning);
      changed_->notify_all();
    }
    return tuning->ended && !tuning->tuned ? nullptr : tuning;
  }

  bool start_thread() WYVERN_REQUIRES(mutex_) {
    try {
      if (!thread_) thread_ = std::make_unique<std::thread>([this] { work(); });
      return true;
    } catch (const std::system_error& error) {
      failed_(fmt::format("nothing is tuned in the background: a thread cannot be started: {}",
                          error.what()));
      return false;
    }
  }

  void tune_now(const Device& device, const Problem& problem, double budget_s)
      WYVERN_EXCLUDES(mutex_) {
    Lock lock(mutex_);
    check_for_fork();
    std::shared_ptr<Tuning> tuning = known(device, problem);
    if (tuning == nullptr)
      tuning = known(device, problem) = std::make_shared<Tuning>(device, problem, budget_s);
    while (busy_ && !stopping_) changed_->wait(lock);
    if (stopping_ || tuning->ended) return;
    std::erase(queue_, tuning);
    run(lock, *tuning, false);
  }

  /// Releases the caller's lock while it tunes, which Clang does not follow.
  void run(Lock& lock, Tuning& tuning, bool meanwhile)
      WYVERN_REQUIRES(mutex_) WYVERN_UNCHECKED_LOCKING {
    busy_ = true;
    lock.unlock();
    std::string failure;
    try {
      failure = tune_({tuning.device, tuning.problem, tuning.budget_s, meanwhile,
                       [this] { return stopping_.load(); }});
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (!failure.empty() && !stopping_)
      failed_(fmt::format("{} was not tuned on {}: {}", problem_key(tuning.problem).to_string(),
                          tuning.device.info().name, failure));
    // The winner was stored by another process, perhaps.
    Cache::note_change();
    lock.lock();
    busy_ = false;
    tuning.ended = true;
    tuning.tuned = failure.empty();
    changed_->notify_all();
  }

  /// Releases its lock while it compiles, which Clang does not follow.
  void compile_all_ahead() WYVERN_UNCHECKED_LOCKING {
    block_signals();
    Lock lock(mutex_);
    while (!ahead_.empty()) {
      const std::function<void()> compile = std::move(ahead_.front());
      ahead_.pop_front();
      lock.unlock();
      try {
        compile();
      } catch (const std::exception&) {  // prepare() throws it again
      }
      lock.lock();
    }
    compiling_ = false;
  }

  void work() WYVERN_EXCLUDES(mutex_) {
    block_signals();
    Lock lock(mutex_);
    for (;;) {
      while (!stopping_ && (queue_.empty() || busy_)) changed_->wait(lock);
      if (stopping_) return;
      const std::shared_ptr<Tuning> tuning = queue_.front();
      queue_.pop_front();
      run(lock, *tuning, true);
    }
  }

  Runtime& runtime_;
  CachePlanSource packs_{nullptr};
  const TuneFunction tune_;
  const std::function<void(const std::string&)> failed_;
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  std::unique_ptr<Condition> changed_ = std::make_unique<Condition>();
  std::map<std::string, std::shared_ptr<Tuning>> known_ WYVERN_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Tuning>> queue_ WYVERN_GUARDED_BY(mutex_);
  std::unique_ptr<std::thread> thread_ WYVERN_GUARDED_BY(mutex_);
  bool busy_ WYVERN_GUARDED_BY(mutex_) = false;  ///< something is being tuned
  std::deque<std::function<void()>> ahead_ WYVERN_GUARDED_BY(mutex_);
  std::unique_ptr<std::thread> compiler_ WYVERN_GUARDED_BY(mutex_);
  bool compiling_ WYVERN_GUARDED_BY(mutex_) = false;  ///< compiler_ takes what ahead_ gets
  ::pid_t pid_ WYVERN_GUARDED_BY(mutex_) = ::getpid();
};

PolicyRuntime::PolicyRuntime(Runtime& runtime, TuneFunction tune,
                             std::function<void(const std::string&)> failed)
    : impl_(std::make_unique<Impl>(runtime, std::move(tune), std::move(failed))) {}
PolicyRuntime::~PolicyRuntime() = default;

PolicyRuntime::Prepared PolicyRuntime::prepare(const Device& device, const Problem& problem,
                                               TuningPolicy policy, double budget_s) {
  return impl_->prepare(device, problem, policy, budget_s);
}
void PolicyRuntime::compile_ahead(const Device& device, const Problem& problem,
                                  TuningPolicy policy) {
  impl_->compile_ahead(device, problem, policy);
}
std::size_t PolicyRuntime::wait(std::chrono::duration<double> longest) {
  return impl_->wait(longest);
}
void PolicyRuntime::stop() { impl_->stop(); }

}  // namespace wyvern
