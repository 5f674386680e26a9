#include "runtime/kernel_store.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace wyvern {
namespace {

/// What identifies a loaded kernel in this process; far cheaper than the artifact key, which hashes
/// the specialized source.
std::string local_key(const OperatorImpl& op, const BoundStep& step) {
  std::string key = op.device.info().name + '|' + step.step.template_id + '|' +
                    step.step.config.to_string() + '|';
  for (const AnyConstant& constant : step.source_template->constants)
    key += fmt::format("{}={},", name_of(constant), to_string(value_of(constant, step.constants)));
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

/// What the operator needs and is not loaded, each kernel once.
std::vector<KernelStore::Missing> KernelStore::missing_from(const OperatorImpl& op) const {
  std::vector<Missing> missing;
  for (const BoundStep& step : op.steps) {
    std::string local = local_key(op, step);
    const bool repeated = std::any_of(missing.begin(), missing.end(),
                                      [&](const Missing& m) { return m.local == local; });
    if (repeated || loaded_.contains(local)) continue;
    CompileRequest request{step.source_template, step.constants, step.step.config,
                           op.device.impl().target()};
    std::string key = artifact_key(request);
    missing.push_back({std::move(local), std::move(key), std::move(request), &step});
  }
  return missing;
}

void KernelStore::add(DeviceImpl& device, const Missing& missing, const Artifact& artifact) {
  loaded_[missing.local] = {artifact.key, artifact.resources,
                            device.load(artifact, missing.step->geometry)};
}

bool KernelStore::add_from_cache(DeviceImpl& device, const Missing& missing) {
  const std::optional<ArtifactRow> row = cache_->find_artifact(missing.key);
  const std::optional<Artifact> artifact = row ? from_row(*row) : std::nullopt;
  if (artifact) add(device, missing, *artifact);
  return artifact.has_value();
}

/// Compiles what no other process is compiling; what others are, is awaited and taken from the
/// cache.
void KernelStore::compile(DeviceImpl& device, std::vector<Missing> missing) {
  std::sort(missing.begin(), missing.end(),
            [](const Missing& a, const Missing& b) { return a.key < b.key; });
  std::vector<ArtifactClaim> claims;
  std::vector<CompileRequest> requests;
  std::vector<const Missing*> compiled;
  for (const Missing& m : missing) {
    ArtifactClaim claim = cache_->claim_artifact(m.key);
    if (add_from_cache(device, m)) continue;
    // Whoever had the claim before could not store the artifact. Nor may this process: holding the
    // claim would make all that wait for it compile one after the other.
    if (!claim.waited()) claims.push_back(std::move(claim));
    requests.push_back(m.request);
    compiled.push_back(&m);
  }
  const std::vector<Artifact> artifacts = compile_all(requests, jobs_);
  for (std::size_t i = 0; i < artifacts.size(); ++i) {
    ++compiled_;
    cache_->store_artifact(to_row(artifacts[i]));
    add(device, *compiled[i], artifacts[i]);
  }
}

void KernelStore::load(OperatorImpl& op) {
  const std::lock_guard lock(mutex_);
  DeviceImpl& device = op.device.impl();
  std::vector<Missing> missing = missing_from(op);
  std::erase_if(missing, [&](const Missing& m) { return add_from_cache(device, m); });
  if (!missing.empty()) compile(device, std::move(missing));
  for (BoundStep& step : op.steps) {
    const Entry& entry = loaded_.at(local_key(op, step));
    step.artifact_key = entry.artifact_key;
    step.resources = entry.resources;
    step.kernel = entry.kernel;
  }
}

}  // namespace wyvern
