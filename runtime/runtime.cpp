#include <wyvern/runtime.hpp>

#include <fmt/format.h>

#include <atomic>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cache/cache.hpp"
#include "runtime/base/fork_guard.hpp"
#include "runtime/base/mutex.hpp"
#include "runtime/base/printable.hpp"
#include "runtime/bind.hpp"
#include "runtime/float_environment.hpp"
#include "runtime/kernel_store.hpp"
#include "runtime/plan.hpp"
#include "runtime/plan_source.hpp"
#include "runtime/recent.hpp"

namespace wyvern {

class Runtime::Impl {
 public:
  explicit Impl(RuntimeOptions options)
      : cache(options.cache ? std::move(options.cache) : std::make_shared<Cache>()),
        plans(options.plans ? std::move(options.plans) : std::make_shared<CachePlanSource>(cache)),
        kernels(cache, options.compile_jobs),
        on_degraded_(std::move(options.on_degraded)) {
    if (!on_degraded_) on_degraded_ = warn;
  }

  /// The same as before where this thread asked a moment ago and nothing has changed since.
  std::shared_ptr<const OperatorImpl> prepare_again(const Device& device, const Problem& problem) {
    const std::optional<std::uint64_t> version = plans->version();
    if (version)
      if (auto op = RecentOperators::find(id_, device.impl(), problem, *version)) return op;
    const DefaultFloatEnvironment plain;  // nothing was computed until here
    validate(problem);
    std::shared_ptr<const OperatorImpl> op = prepare(device, problem, *plans);
    if (version) {
      RecentOperators::remember(id_, *version, op);
      keep(op);
    }
    return op;
  }

  /// The operator by the best known plan that this build and device accept. A plan whose kernels do
  /// not load is replaced by the default plan, and later by the next one.
  std::shared_ptr<OperatorImpl> prepare(const Device& device, const Problem& problem,
                                        PlanSource& source) {
    // Results must not depend on stored winners.
    if (problem.batch_invariant) return prepare_default(device, problem);
    const ProblemKey key = problem_key(problem);
    std::shared_ptr<OperatorImpl> bound;
    const std::optional<PlanChoice> choice = choose(device, problem, key, source, bound);
    if (choice && !choice->passed_over.empty()) tell_of(device, key, *choice);
    if (!is_of_use(device, key, choice)) return prepare_default(device, problem);
    try {
      if (bound == nullptr) bound = bind(device, problem, choice->plan);
      return load(std::move(bound), choice->origin);
    } catch (const Error& error) {
      // If the default plan fails too, its exception is reported.
      std::shared_ptr<OperatorImpl> op = prepare_default(device, problem);
      refuse(device, key, choice->plan, error);
      return op;
    }
  }

  void compile_ahead(const Device& device, const Problem& problem, PlanSource& source) {
    const ProblemKey key = problem_key(problem);
    std::shared_ptr<OperatorImpl> bound;
    std::optional<PlanChoice> choice;
    if (!problem.batch_invariant) choice = choose(device, problem, key, source, bound);
    if (!is_of_use(device, key, choice))
      bound = bind_default(device, problem);
    else if (bound == nullptr)
      bound = bind(device, problem, choice->plan);
    kernels.compile_ahead(*bound);
  }

  std::shared_ptr<OperatorImpl> prepare(const Device& device, const Problem& problem,
                                        const Plan& plan, Origin origin) {
    return load(bind(device, problem, plan), origin);
  }

  std::shared_ptr<Cache> cache;
  std::shared_ptr<PlanSource> plans;
  KernelStore kernels;

 private:
  static std::shared_ptr<OperatorImpl> bind(const Device& device, const Problem& problem,
                                            const Plan& plan, bool is_default = false) {
    const NoFork no_fork;
    return bind_operator(device, problem, plan, is_default);
  }

  std::shared_ptr<OperatorImpl> load(std::shared_ptr<OperatorImpl> op, Origin origin) {
    const NoFork no_fork;
    op->origin = origin;
    kernels.load(*op);
    return op;
  }

  static std::shared_ptr<OperatorImpl> bind_default(const Device& device, const Problem& problem) {
    return bind(device, problem, default_plan(problem, device.impl().target()),
                /*is_default=*/true);
  }
  std::shared_ptr<OperatorImpl> prepare_default(const Device& device, const Problem& problem) {
    return load(bind_default(device, problem), Origin::fallback);
  }

  /// What the source says. `bound`: the operator by this plan where its check bound it, else null.
  std::optional<PlanChoice> choose(const Device& device, const Problem& problem,
                                   const ProblemKey& key, PlanSource& source,
                                   std::shared_ptr<OperatorImpl>& bound) {
    std::optional<PlanChoice> choice =
        source.find(device.info(), key, [&](const Plan& plan) -> std::string {
          bound = nullptr;
          if (is_refused(device, key, plan)) return "its kernels did not load";
          try {
            bound = bind(device, problem, plan);
            return "";
          } catch (const Error& error) {
            return error.what();
          }
        });
    if (bound != nullptr && (!choice || bound->plan != choice->plan)) bound = nullptr;
    return choice;
  }
  /// Whether there is a plan to be used, other than the default plan.
  bool is_of_use(const Device& device, const ProblemKey& key,
                 const std::optional<PlanChoice>& choice) WYVERN_EXCLUDES(mutex_) {
    return choice && choice->origin != Origin::fallback && !is_refused(device, key, choice->plan);
  }

  static std::string family_of(const Device& device, const ProblemKey& key) {
    return device.info().name + '/' + key.family;
  }
  /// The key of a problem in refused_.
  static std::string name_of(const Device& device, const ProblemKey& key) {
    return device.info().name + '/' + key.to_string();
  }

  /// Warns once about a plan that cannot be used, for all counts of tokens and sequences.
  void tell_of(const Device& device, const ProblemKey& key, const PlanChoice& choice)
      WYVERN_EXCLUDES(mutex_) {
    {
      const Lock lock(mutex_);
      if (!told_.insert(family_of(device, key)).second) return;
    }
    on_degraded_(
        fmt::format("{}, so {} takes its place: tune this problem again", choice.passed_over,
                    choice.origin == Origin::fallback ? "the default plan" : "another tuned plan"));
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
      told_.insert(family_of(device, key));
    }
    const std::string_view what = error.what();
    on_degraded_(
        fmt::format("the tuned plan for {} on {} cannot be used ({}), so the default plan "
                    "takes its place: tune this problem again",
                    key.to_string(), device.info().name, what.substr(0, what.find('\n'))));
  }

  /// Threads remember operators weakly, and callers may drop theirs after each launch.
  void keep(const std::shared_ptr<const OperatorImpl>& op) WYVERN_EXCLUDES(mutex_) {
    constexpr std::size_t kKept = 64;
    std::shared_ptr<const OperatorImpl> dropped;  // outside the lock: it may unload kernels
    const NoFork no_fork;
    const Lock lock(mutex_);
    for (std::shared_ptr<const OperatorImpl>& one : kept_)
      if (&one->device.impl() == &op->device.impl() && one->problem == op->problem) {
        dropped = std::exchange(one, op);
        return;
      }
    if (kept_.size() < kKept) {
      kept_.push_back(op);
      return;
    }
    dropped = std::exchange(kept_.at(next_kept_), op);
    next_kept_ = (next_kept_ + 1) % kKept;
  }

  static std::uint64_t next_id() {
    static std::atomic<std::uint64_t> ids = 0;
    return ++ids;
  }

  const std::uint64_t id_ = next_id();  ///< no other runtime of the process has or had it
  std::function<void(const std::string&)> on_degraded_;
  Mutex mutex_;
  std::vector<std::shared_ptr<const OperatorImpl>> kept_ WYVERN_GUARDED_BY(mutex_);
  std::size_t next_kept_ WYVERN_GUARDED_BY(mutex_) = 0;
  std::unordered_map<std::string, Plan> refused_ WYVERN_GUARDED_BY(mutex_);
  /// The families and devices for which a warning said that a plan cannot be used.
  std::unordered_set<std::string> told_ WYVERN_GUARDED_BY(mutex_);
};

Runtime::Runtime(RuntimeOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Runtime::~Runtime() = default;

Operator Runtime::prepare(const Device& device, const Problem& problem) {
  return Operator(impl_->prepare_again(device, problem));
}

Operator Runtime::prepare(const Device& device, const Problem& problem, const Plan& plan) {
  const DefaultFloatEnvironment plain;
  validate(problem);
  return Operator(impl_->prepare(device, problem, plan, Origin::given));
}

Operator Runtime::prepare(const Device& device, const Problem& problem, PlanSource& plans) {
  const DefaultFloatEnvironment plain;
  validate(problem);
  return Operator(impl_->prepare(device, problem, plans));
}

void Runtime::compile_ahead(const Device& device, const Problem& problem) {
  compile_ahead(device, problem, *impl_->plans);
}

void Runtime::compile_ahead(const Device& device, const Problem& problem, PlanSource& plans) {
  const DefaultFloatEnvironment plain;
  validate(problem);
  impl_->compile_ahead(device, problem, plans);
}

Stage Runtime::prepare_stage(const Device& device, const PlanStep& step, const Problem& problem) {
  const DefaultFloatEnvironment plain;
  validate(problem);
  const NoFork no_fork;
  std::shared_ptr<OperatorImpl> op = bind_stage(device, problem, step);
  impl_->kernels.load(*op);
  return Stage(std::move(op));
}

Fold Runtime::prepare_fold(const Device& device, const FoldOptions& options) {
  const DefaultFloatEnvironment plain;
  const NoFork no_fork;
  std::shared_ptr<OperatorImpl> op = bind_fold(device, options);
  impl_->kernels.load(*op);
  return {options, std::move(op)};
}

std::int64_t Runtime::compiled() const { return impl_->kernels.compiled(); }
Cache& Runtime::cache() { return *impl_->cache; }

}  // namespace wyvern
