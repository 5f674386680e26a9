#include <wyvern/runtime.hpp>

#include "cache/cache.hpp"
#include "runtime/bind.hpp"
#include "runtime/kernel_store.hpp"
#include "runtime/plan_source.hpp"

namespace wyvern {

class Runtime::Impl {
 public:
  explicit Impl(RuntimeOptions options)
      : cache(options.cache ? std::move(options.cache) : std::make_shared<Cache>()),
        plans(options.plans ? std::move(options.plans) : std::make_shared<CachePlanSource>(cache)),
        kernels(cache, options.compile_jobs) {}

  /// The operator bound by the best plan known. A remembered plan that this build or device no
  /// longer accepts is passed over.
  std::shared_ptr<OperatorImpl> bind(const Device& device, const Problem& problem) {
    if (const auto choice = plans->find(device.info(), problem_key(problem))) {
      try {
        auto op = bind_operator(device, problem, choice->plan);
        op->origin = choice->origin;
        return op;
      } catch (const Error&) {
      }
    }
    auto op = bind_operator(device, problem, default_plan(problem, device.impl().target()));
    op->origin = Origin::fallback;
    return op;
  }

  std::shared_ptr<Cache> cache;
  std::shared_ptr<PlanSource> plans;
  KernelStore kernels;
};

Runtime::Runtime(RuntimeOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Runtime::~Runtime() = default;

Operator Runtime::prepare(const Device& device, const Problem& problem) {
  validate(problem);
  std::shared_ptr<OperatorImpl> op = impl_->bind(device, problem);
  impl_->kernels.load(*op);
  return Operator(std::move(op));
}

Operator Runtime::prepare(const Device& device, const Problem& problem, const Plan& plan) {
  validate(problem);
  std::shared_ptr<OperatorImpl> op = bind_operator(device, problem, plan);
  op->origin = Origin::given;
  impl_->kernels.load(*op);
  return Operator(std::move(op));
}

Stage Runtime::prepare_stage(const Device& device, const PlanStep& step, const Problem& problem) {
  validate(problem);
  std::shared_ptr<OperatorImpl> op = bind_stage(device, problem, step);
  impl_->kernels.load(*op);
  return Stage(std::move(op));
}

std::int64_t Runtime::compiled() const { return impl_->kernels.compiled(); }
Cache& Runtime::cache() { return *impl_->cache; }

}  // namespace wyvern
