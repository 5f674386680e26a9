#include <wyvern/runtime.hpp>

#include <fmt/format.h>

#include <cstdio>
#include <unordered_map>

#include "cache/cache.hpp"
#include "cache/fork_guard.hpp"
#include "cache/mutex.hpp"
#include "runtime/bind.hpp"
#include "runtime/kernel_store.hpp"
#include "runtime/plan_source.hpp"

namespace wyvern {

class Runtime::Impl {
 public:
  explicit Impl(RuntimeOptions options)
      : cache(options.cache ? std::move(options.cache) : std::make_shared<Cache>()),
        plans(options.plans ? std::move(options.plans) : std::make_shared<CachePlanSource>(cache)),
        kernels(cache, options.compile_jobs),
        on_degraded_(std::move(options.on_degraded)) {
    if (!on_degraded_)
      on_degraded_ = [](const std::string& sentence) {
        std::fprintf(stderr, "wyvern: %s.\n", sentence.c_str());
      };
  }

  /// The operator by the best plan known. A remembered plan that this build or device no longer
  /// accepts, or whose kernels do not load, gives way to the default plan.
  std::shared_ptr<OperatorImpl> prepare(const Device& device, const Problem& problem) {
    const ProblemKey key = problem_key(problem);
    const std::optional<PlanChoice> choice = plans->find(device.info(), key);
    if (!choice || is_refused(device, key, choice->plan)) return prepare_default(device, problem);
    try {
      return prepare(device, problem, choice->plan, choice->origin);
    } catch (const Error& error) {
      // Where the default plan fails too, what it throws is the trouble to tell of.
      std::shared_ptr<OperatorImpl> op = prepare_default(device, problem);
      refuse(device, key, choice->plan, error);
      return op;
    }
  }

  std::shared_ptr<OperatorImpl> prepare(const Device& device, const Problem& problem,
                                        const Plan& plan, Origin origin) {
    const NoFork no_fork;
    std::shared_ptr<OperatorImpl> op = bind_operator(device, problem, plan);
    op->origin = origin;
    kernels.load(*op);
    return op;
  }

  std::shared_ptr<Cache> cache;
  std::shared_ptr<PlanSource> plans;
  KernelStore kernels;

 private:
  std::shared_ptr<OperatorImpl> prepare_default(const Device& device, const Problem& problem) {
    return prepare(device, problem, default_plan(problem, device.impl().target()),
                   Origin::fallback);
  }

  /// What refused_ has a problem under.
  static std::string name_of(const Device& device, const ProblemKey& key) {
    return device.info().name + '/' + key.to_string();
  }

  bool is_refused(const Device& device, const ProblemKey& key, const Plan& plan)
      WYVERN_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    if (refused_.empty()) return false;
    const auto found = refused_.find(name_of(device, key));
    return found != refused_.end() && found->second == plan;
  }

  /// Remembers the plan, since trying it again may compile for seconds, and says so the first time.
  void refuse(const Device& device, const ProblemKey& key, const Plan& plan, const Error& error)
      WYVERN_EXCLUDES(mutex_) {
    {
      const Lock lock(mutex_);
      const auto [found, added] = refused_.try_emplace(name_of(device, key), plan);
      if (!added && found->second == plan) return;
      found->second = plan;
    }
    const std::string_view what = error.what();
    on_degraded_(
        fmt::format("the tuned plan for {} on {} cannot be used ({}), so the default plan "
                    "takes its place: tune this problem again",
                    key.to_string(), device.info().name, what.substr(0, what.find('\n'))));
  }

  std::function<void(const std::string&)> on_degraded_;
  Mutex mutex_;
  std::unordered_map<std::string, Plan> refused_ WYVERN_GUARDED_BY(mutex_);
};

Runtime::Runtime(RuntimeOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Runtime::~Runtime() = default;

Operator Runtime::prepare(const Device& device, const Problem& problem) {
  validate(problem);
  return Operator(impl_->prepare(device, problem));
}

Operator Runtime::prepare(const Device& device, const Problem& problem, const Plan& plan) {
  validate(problem);
  return Operator(impl_->prepare(device, problem, plan, Origin::given));
}

Stage Runtime::prepare_stage(const Device& device, const PlanStep& step, const Problem& problem) {
  validate(problem);
  const NoFork no_fork;
  std::shared_ptr<OperatorImpl> op = bind_stage(device, problem, step);
  impl_->kernels.load(*op);
  return Stage(std::move(op));
}

std::int64_t Runtime::compiled() const { return impl_->kernels.compiled(); }
Cache& Runtime::cache() { return *impl_->cache; }

}  // namespace wyvern
