#include "autotune/build.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "autotune/space.hpp"
#include "runtime/kernel_store.hpp"
#include "templates/template.hpp"

namespace wyvern {
namespace {

/// How often a wait checks for an interruption.
constexpr auto kGlance = std::chrono::milliseconds(100);

/// The worker that measures, and this process, which it answers.
constexpr unsigned kCoresOfMeasuring = 2;

}  // namespace

unsigned compile_threads(unsigned jobs, bool overlap) {
  if (jobs != 0) return jobs;
  const unsigned cores = std::max(std::thread::hardware_concurrency(), 1U);
  return overlap ? std::max(cores, kCoresOfMeasuring + 1) - kCoresOfMeasuring : cores;
}

CompileRequest CompilingBuilder::request(const KernelSpec& spec) const {
  return {find_template(spec.template_id), spec.constants, spec.config, target_};
}

std::string CompilingBuilder::key(const KernelSpec& spec) { return artifact_key(request(spec)); }

Built CompilingBuilder::build(const KernelSpec& spec) {
  const CompileRequest wanted = request(spec);
  Built built;
  built.threads = launch_of(*wanted.source_template, Spec(spec.constants, spec.config), problem_,
                            Rows::tokens, target_.limits)
                      .threads;
  built.artifact_key = artifact_key(wanted);
  if (const auto row = cache_.find_artifact(built.artifact_key))
    if (const auto artifact = from_row(*row)) {
      built.resources = artifact->resources;
      built.compile_ms = artifact->compile_ms;
      return built;
    }
  const Artifact artifact = compile(wanted);
  // A cache that cannot store does no harm here: the worker compiles kernels that it does not find.
  cache_.store_artifact(to_row(artifact));
  built.resources = artifact.resources;
  built.compile_ms = artifact.compile_ms;
  built.compiled = true;
  return built;
}

BuildResult try_build(Builder& builder, const KernelSpec& spec) {
  BuildResult result;
  try {
    result.built = builder.build(spec);
  } catch (const Error& error) {
    result.error = error.what();
    result.kind = error.kind();
  } catch (const std::exception& error) {
    result.error = error.what();
    result.kind = ErrorKind::kIo;
  }
  return result;
}

CompileAhead::CompileAhead(Builder& builder, unsigned jobs, bool overlap)
    : builder_(builder),
      overlap_(overlap),
      batch_(std::size_t{4} * compile_threads(jobs, overlap)) {
  try {
    for (unsigned i = 0; i < compile_threads(jobs, overlap); ++i)
      threads_.emplace_back([this] { work(); });
  } catch (const std::exception& error) {  // with fewer threads it takes longer
    if (threads_.empty())
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("no thread that compiles can be started: {}", error.what()));
  }
}

CompileAhead::~CompileAhead() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void CompileAhead::announce(std::span<const KernelSpec> specs) {
  const Lock lock(mutex_);
  queue_.clear();
  std::set<KernelSpec> queued;
  for (const KernelSpec& spec : specs)
    if (!done_.contains(spec) && !running_.contains(spec) && queued.insert(spec).second)
      queue_.push_back(spec);
  wake_.notify_all();
}

std::optional<BuildResult> CompileAhead::wait(const KernelSpec& spec,
                                              const std::function<bool()>& interrupted) {
  Lock lock(mutex_);
  if (!done_.contains(spec)) allow_batch(spec);
  while (!ready(spec)) {
    if (failure_) std::rethrow_exception(failure_);
    finished_.wait_for(lock, kGlance);
    if (!ready(spec) && interrupted && interrupted()) return {};
  }
  return done_.at(spec);
}

bool CompileAhead::ready(const KernelSpec& spec) const {
  return done_.contains(spec) && (overlap_ || (running_.empty() && allowance_ == 0));
}

bool CompileAhead::may_begin() const { return !queue_.empty() && (overlap_ || allowance_ > 0); }

void CompileAhead::allow_batch(const KernelSpec& first) {
  if (!running_.contains(first)) {
    std::erase(queue_, first);
    queue_.push_front(first);
  }
  allowance_ = std::min(batch_, queue_.size());
  wake_.notify_all();
}

std::optional<Built> CompileAhead::finished(const KernelSpec& spec) const {
  const Lock lock(mutex_);
  const auto found = done_.find(spec);
  return found == done_.end() ? std::nullopt : found->second.built;
}

std::int64_t CompileAhead::compiled() const {
  const Lock lock(mutex_);
  return compiled_;
}

void CompileAhead::work() {
  try {
    work_until_stopped();
  } catch (...) {  // no memory for a build's result
    const Lock lock(mutex_);
    failure_ = std::current_exception();
    finished_.notify_all();
  }
}

void CompileAhead::work_until_stopped() {
  Lock lock(mutex_);
  for (;;) {
    while (!stopping_ && !may_begin()) wake_.wait(lock);
    if (stopping_) return;
    const KernelSpec spec = queue_.front();
    queue_.pop_front();
    running_.insert(spec);
    if (allowance_ > 0) --allowance_;
    lock.unlock();
    BuildResult result = try_build(builder_, spec);
    lock.lock();
    running_.erase(spec);
    if (result.built && result.built->compiled) ++compiled_;
    done_.emplace(spec, std::move(result));
    finished_.notify_all();
  }
}

}  // namespace wyvern
