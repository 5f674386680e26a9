#include "autotune/policy.hpp"

#include <chrono>
#include <limits>
#include <utility>

#include "runtime/base/mutex.hpp"

namespace wyvern {

class TuningRuntime::Impl {
 public:
  Impl(Runtime& runtime, TuningPolicy policy, TuneOptions options)
      : runtime_(runtime),
        policy_(policy),
        options_(std::move(options)),
        policies_(
            runtime, [this](const TuneRequest& request) { return tune_one(request); },
            [this](const std::string& sentence) {
              const Lock lock(mutex_);
              last_failure_ = sentence;
            }) {}

  Operator prepare(const Device& device, const Problem& problem) {
    return policies_.prepare(device, problem, policy_, options_.budget.count()).op;
  }

  void wait() {
    policies_.wait(std::chrono::duration<double>(std::numeric_limits<double>::infinity()));
  }

  std::string last_failure() const WYVERN_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    return last_failure_;
  }

 private:
  std::string tune_one(const TuneRequest& request) {
    TuneOptions options = options_;
    options.interrupted = [&] {
      return request.stopping() || (options_.interrupted && options_.interrupted());
    };
    const TuneResult result = tune(runtime_, request.device, request.problem, options);
    if (result.interrupted) return "it was interrupted";
    return result.stored ? "" : "its winner could not be stored";
  }

  Runtime& runtime_;
  const TuningPolicy policy_;
  const TuneOptions options_;
  mutable Mutex mutex_;
  std::string last_failure_ WYVERN_GUARDED_BY(mutex_);
  PolicyRuntime policies_;  ///< ends first
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
