#include "runtime/kernel_store.hpp"

#include <wyvern/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <utility>

#include "runtime/base/fork_guard.hpp"
#include "runtime/base/json_text.hpp"
#include "runtime/base/parallel.hpp"

namespace wyvern {
namespace {

/// The identity of a loaded kernel in this process; far cheaper than the artifact key, which hashes
/// the specialized source.
std::string local_key(const OperatorImpl& op, const BoundStep& step) {
  return op.device.info().name + '|' + step.step.template_id + '|' + step.step.config.to_string() +
         '|' + step.source_template->values_of(step.constants).to_string();
}

}  // namespace

ArtifactRow to_row(const Artifact& artifact) {
  ArtifactRow row;
  row.key = artifact.key;
  row.template_id = artifact.template_id;
  row.target = artifact.target;
  row.config = artifact.config;
  row.code = artifact.code;
  row.compile_ms = artifact.compile_ms;
  row.metadata =
      nlohmann::json{
          {"constants", artifact.constants},
          {"entry", artifact.entry},
          {"registers", artifact.resources.registers},
          {"shared_bytes", artifact.resources.shared_bytes},
          {"stack_bytes", artifact.resources.stack_bytes},
          {"spill_bytes", artifact.resources.spill_bytes},
      }
          .dump();
  return row;
}

std::optional<Artifact> from_row(const ArtifactRow& row) {
  const auto json = parse_json(row.metadata);
  if (!json.is_object()) return {};
  Artifact artifact;
  artifact.key = row.key;
  artifact.template_id = row.template_id;
  artifact.target = row.target;
  artifact.config = row.config;
  artifact.code = row.code;
  artifact.compile_ms = row.compile_ms;
  try {
    artifact.constants = json.at("constants").get<std::string>();
    artifact.entry = json.at("entry").get<std::string>();
    artifact.resources.registers = json.at("registers").get<int>();
    artifact.resources.shared_bytes = json.at("shared_bytes").get<std::int64_t>();
    artifact.resources.stack_bytes = json.at("stack_bytes").get<std::int64_t>();
    artifact.resources.spill_bytes = json.at("spill_bytes").get<std::int64_t>();
    artifact.resources.code_bytes = static_cast<std::int64_t>(row.code.size());
  } catch (const nlohmann::json::exception&) {
    return {};
  }
  return artifact;
}

/// The kernel of every step, loaded or to come. Kernels that no thread makes become this thread's
/// tasks.
std::vector<KernelStore::Future> KernelStore::futures_of(const OperatorImpl& op,
                                                         std::vector<Task>& tasks) {
  std::vector<std::string> keys;
  keys.reserve(op.steps.size());
  for (const BoundStep& step : op.steps) keys.push_back(local_key(op, step));
  std::vector<Future> futures;
  futures.reserve(op.steps.size());
  const Lock lock(mutex_);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    auto found = kernels_.find(keys[i]);
    if (found == kernels_.end()) {
      Task& task = tasks.emplace_back(Task{.local_key = keys[i], .step = &op.steps[i]});
      found = kernels_.emplace(keys[i], task.promise.get_future().share()).first;
    }
    futures.push_back(found->second);
  }
  return futures;
}

/// Ends the task when `attempt` returns an entry or throws: all waiting threads get the result.
template <class Attempt>
void KernelStore::settle(Task& task, Attempt&& attempt) {
  try {
    if (std::optional<Entry> entry = attempt()) {
      task.promise.set_value(std::move(*entry));
      task.settled = true;
    }
  } catch (...) {
    fail(task, std::current_exception());
  }
}

void KernelStore::fail(Task& task, std::exception_ptr error) {
  {
    // First, so that a thread that sees the failure and tries again starts a new task.
    const Lock lock(mutex_);
    kernels_.erase(task.local_key);
  }
  task.promise.set_exception(std::move(error));
  task.settled = true;
}

/// Nothing for an artifact that does not load: one of the cache is replaced when it is compiled
/// anew.
std::optional<KernelStore::Entry> KernelStore::from_row(DeviceImpl& device, const Task& task,
                                                        const std::optional<ArtifactRow>& row) {
  const std::optional<Artifact> artifact = row ? wyvern::from_row(*row) : std::nullopt;
  if (!artifact) return {};
  try {
    return Entry{artifact->key, artifact->resources, device.load(*artifact, task.step->geometry)};
  } catch (const Error&) {
    return {};
  }
}

/// Before the compiler is opened, which may be missing.
std::optional<KernelStore::Entry> KernelStore::from_shipped(DeviceImpl& device, const Task& task) {
  if (shipped_->empty()) return {};
  return from_row(device, task, shipped_->find(task.request.target.name(), code_key(task.request)));
}

std::optional<KernelStore::Entry> KernelStore::from_cache(DeviceImpl& device, const Task& task) {
  return from_row(device, task, cache_->find_artifact(task.artifact_key));
}

KernelStore::Time KernelStore::give_up_time() const {
  return std::chrono::steady_clock::now() +
         (in_vain_ ? std::min(patience_, kShortPatience) : patience_);
}

ArtifactClaim KernelStore::claim_of(const std::string& artifact_key, Time give_up) {
  ArtifactClaim claim = cache_->claim_artifact(artifact_key, give_up);
  slept_ms_ += claim.slept().count();
  if (claim.waited()) in_vain_ = claim.in_vain();
  return claim;
}

/// Whether the cache has stored it.
bool KernelStore::compile_and_store(const CompileRequest& request, Artifact& artifact) {
  artifact = compile(request);
  ++compiled_;
  return cache_->store_artifact(to_row(artifact));
}

/// Compiles the kernel unless another process is compiling it; then waits and loads it from the
/// cache. Holds at most one claim, and none while it waits, so that there is no deadlock.
KernelStore::Entry KernelStore::compiled_once(DeviceImpl& device, const Task& task, Time give_up) {
  if (const auto ahead = take_ahead(task.artifact_key))
    return {ahead->key, ahead->resources, device.load(*ahead, task.step->geometry)};
  std::optional<ArtifactClaim> claim = claim_of(task.artifact_key, give_up);
  if (std::optional<Entry> entry = from_cache(device, task)) return std::move(*entry);
  // The previous holder of the claim could not store the artifact. This process may not be able to
  // either: if it held the claim, all waiting processes would compile one after another.
  if (claim->waited()) claim.reset();
  Artifact artifact;
  compile_and_store(task.request, artifact);
  return {artifact.key, artifact.resources, device.load(artifact, task.step->geometry)};
}

void KernelStore::make(DeviceImpl& device, std::vector<Task>& tasks) {
  std::vector<Task*> missing;
  for (Task& task : tasks) {
    settle(task, [&] {
      const BoundStep& step = *task.step;
      task.request = {step.source_template, step.constants, step.step.config, device.target()};
      if (auto entry = from_shipped(device, task)) return entry;
      task.artifact_key = artifact_key(task.request);
      return from_cache(device, task);
    });
    if (!task.settled) missing.push_back(&task);
  }
  // For all of them together: a stopped process may hold the claim to each.
  const Time give_up = give_up_time();
  in_parallel(missing.size(), jobs_, [&](std::size_t i) {
    settle(*missing[i], [&] { return std::optional(compiled_once(device, *missing[i], give_up)); });
  });
}

void KernelStore::load(OperatorImpl& op) {
  // A child would wait for ever for this thread's kernel, or for a lock of the compiler's.
  const NoFork no_fork;
  std::vector<Task> tasks;
  std::vector<Future> futures;
  try {
    futures = futures_of(op, tasks);
    make(op.device.impl(), tasks);
  } catch (...) {
    // Without memory or a thread, those who wait must still get an error.
    for (Task& task : tasks)
      if (!task.settled) fail(task, std::current_exception());
    throw;
  }
  for (std::size_t i = 0; i < futures.size(); ++i) {
    const Entry& entry = futures[i].get();
    op.steps[i].artifact_key = entry.artifact_key;
    op.steps[i].resources = entry.resources;
    op.steps[i].kernel = entry.kernel;
  }
}

/// The kernels that are neither loaded, nor shipped, nor in the cache, and that no thread makes.
std::vector<KernelStore::AheadTask> KernelStore::ahead_tasks(const OperatorImpl& op) {
  std::vector<AheadTask> tasks;
  const Target& target = op.device.impl().target();
  for (const BoundStep& step : op.steps) {
    {
      const Lock lock(mutex_);
      if (kernels_.contains(local_key(op, step))) continue;
    }
    AheadTask task{{step.source_template, step.constants, step.step.config, target}, {}};
    if (!shipped_->empty() && shipped_->find(target.name(), code_key(task.request))) continue;
    task.artifact_key = artifact_key(task.request);
    if (cache_->find_artifact(task.artifact_key)) continue;
    const Lock lock(mutex_);
    if (ahead_.try_emplace(task.artifact_key, task.promise.get_future().share()).second)
      tasks.push_back(std::move(task));
  }
  return tasks;
}

std::shared_ptr<const Artifact> KernelStore::compiled_ahead(AheadTask& task, Time give_up) {
  std::optional<ArtifactClaim> claim = claim_of(task.artifact_key, give_up);
  if (cache_->find_artifact(task.artifact_key)) return nullptr;
  if (claim->waited()) claim.reset();  // as in compiled_once()
  Artifact artifact;
  if (compile_and_store(task.request, artifact)) return nullptr;
  return std::make_shared<const Artifact>(std::move(artifact));
}

void KernelStore::compile_ahead(const OperatorImpl& op) {
  const NoFork no_fork;
  std::vector<AheadTask> tasks = ahead_tasks(op);
  const Time give_up = give_up_time();
  in_parallel(tasks.size(), jobs_, [&](std::size_t i) {
    std::shared_ptr<const Artifact> unstored;
    try {
      unstored = compiled_ahead(tasks[i], give_up);
    } catch (const std::exception&) {  // the load() that needs it compiles again, and throws it
    }
    if (unstored == nullptr) {
      const Lock lock(mutex_);
      ahead_.erase(tasks[i].artifact_key);
    }
    tasks[i].promise.set_value(std::move(unstored));
  });
}

/// Waits for a kernel that compile_ahead() makes, and takes it where the cache could not store it.
std::shared_ptr<const Artifact> KernelStore::take_ahead(const std::string& artifact_key) {
  Ahead ahead;
  {
    const Lock lock(mutex_);
    const auto found = ahead_.find(artifact_key);
    if (found == ahead_.end()) return nullptr;
    ahead = found->second;
  }
  std::shared_ptr<const Artifact> artifact;
  try {
    artifact = ahead.get();
  } catch (const std::future_error&) {  // memory or threads ran out before it was made
  }
  const Lock lock(mutex_);
  ahead_.erase(artifact_key);
  return artifact;
}

}  // namespace wyvern
