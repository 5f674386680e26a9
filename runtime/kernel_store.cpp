#include "runtime/kernel_store.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace wyvern {
namespace {

/// What identifies a loaded kernel in this process; far cheaper than the artifact key, which hashes
/// the specialized source.
std::string local_key(const OperatorImpl& op, const BoundStep& step) {
  std::string key = op.device.info().name + '|' + step.step.template_id + '|' +
                    step.step.config.to_string() + '|';
  for (const std::string& name : step.source_template->constants)
    key += name + '=' + to_string(*step.constants.find(name)) + ',';
  return key;
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
  row.metadata = nlohmann::json{
      {"constants", artifact.constants},
      {"entry", artifact.entry},
      {"registers", artifact.resources.registers},
      {"shared_bytes", artifact.resources.shared_bytes},
      {"stack_bytes", artifact.resources.stack_bytes},
      {"spill_bytes", artifact.resources.spill_bytes},
  }.dump();
  return row;
}

std::optional<Artifact> from_row(const ArtifactRow& row) {
  const auto json = nlohmann::json::parse(row.metadata, nullptr, false);
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

std::optional<Artifact> KernelStore::from_cache(const std::string& key) const {
  const std::optional<ArtifactRow> row = cache_->find_artifact(key);
  return row ? from_row(*row) : std::nullopt;
}

void KernelStore::to_cache(const Artifact& artifact) { cache_->store_artifact(to_row(artifact)); }

void KernelStore::load(OperatorImpl& op) {
  const std::lock_guard lock(mutex_);
  DeviceImpl& device = op.device.impl();
  struct Missing {
    std::string local;
    std::string key;
    const BoundStep* step;
  };
  std::vector<Missing> missing;
  std::vector<CompileRequest> requests;
  const auto add = [&](const std::string& local, const Artifact& artifact, const Geometry& block) {
    loaded_[local] = {artifact.key, artifact.resources, device.load(artifact, block)};
  };
  for (const BoundStep& step : op.steps) {
    const std::string local = local_key(op, step);
    if (loaded_.contains(local)) continue;
    const bool repeated = std::any_of(missing.begin(), missing.end(),
                                      [&](const Missing& m) { return m.local == local; });
    if (repeated) continue;
    CompileRequest request{step.source_template, step.constants, step.step.config,
                           device.target()};
    std::string key = artifact_key(request);
    if (const auto artifact = from_cache(key)) {
      add(local, *artifact, step.geometry);
    } else {
      missing.push_back({local, std::move(key), &step});
      requests.push_back(std::move(request));
    }
  }
  if (!requests.empty()) {
    const std::vector<Artifact> artifacts = compile_all(requests, jobs_);
    for (std::size_t i = 0; i < artifacts.size(); ++i) {
      ++compiled_;
      to_cache(artifacts[i]);
      add(missing[i].local, artifacts[i], missing[i].step->geometry);
    }
  }
  for (BoundStep& step : op.steps) {
    const Entry& entry = loaded_.at(local_key(op, step));
    step.artifact_key = entry.artifact_key;
    step.resources = entry.resources;
    step.kernel = entry.kernel;
  }
}

}  // namespace wyvern
