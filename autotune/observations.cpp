#include "autotune/observations.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "runtime/kernel_store.hpp"

namespace wyvern {
namespace {

/// More would be cut by the model.
constexpr std::size_t kMostRows = 2000;

/// The number after "name=" in a problem key, 0 when there is none.
std::int64_t number_in(std::string_view key, std::string_view name) {
  const std::size_t at = key.rfind(name);
  std::int64_t value = 0;
  if (at != std::string_view::npos)
    std::from_chars(key.data() + at + name.size(), key.data() + key.size(), value);
  return value;
}

/// A problem of the sizes of a key's buckets, from which blocks and waves are counted.
Problem sizes_of(std::string_view key, const Constants& constants) {
  const std::int64_t tokens = number_in(key, "/tokens="), sequences = number_in(key, "/sequences=");
  Problem problem;
  problem.packed = constants.VARLEN;
  problem.N = sequences;
  problem.B = constants.VARLEN ? 1 : std::max<std::int64_t>(sequences, 1);
  problem.T = tokens / problem.B;
  problem.HV = constants.HV;
  problem.H = constants.H;
  problem.num_householder = constants.STEPS;
  return problem;
}

std::optional<Observation> observation(const MeasurementRow& row, const Artifact& artifact,
                                       const SearchSpace& space) {
  const Template* const t = find_template(row.template_id);
  if (t == nullptr) return {};
  try {
    const Config config = Values::parse(row.config);
    // A kernel serves all head counts: the artifact has those it was compiled at first.
    Constants constants = Constants().with(Values::parse(artifact.constants));
    constants.H = number_in(row.problem, "/H=");
    constants.HV = number_in(row.problem, ",HV=");
    constants.GATE_HEADS = constants.HV * constants.GATE_K;
    Limits limits;
    limits.multiprocessors = space.multiprocessors;
    const Launch launch = launch_of(*t, Spec(constants, config), sizes_of(row.problem, constants),
                                    Rows::tokens, limits);
    const std::int64_t BT = config.contains("BT") ? config.integer("BT") : 0;
    const std::int64_t SEG = config.contains("SEG") ? config.integer("SEG") : 0;
    return Observation{
        row.template_id,
        fmt::format("{} {} {} {}", row.problem, t->values_of(constants).to_string(), BT, SEG),
        features(config, launch, space.multiprocessors, artifact.resources), row.median_us};
  } catch (const Error&) {
    return {};  // of a build whose templates were others
  }
}

}  // namespace

std::vector<Observation> observations(const Cache& cache, std::string_view device,
                                      const ProblemKey& own, const SearchSpace& space) {
  std::set<std::string, std::less<>> templates;
  for (const Group& group : space.groups) templates.insert(group.template_id);
  std::vector<MeasurementRow> rows = cache.list_measurements();
  const std::string key = own.to_string();
  std::erase_if(rows, [&](const MeasurementRow& row) {
    return row.device != device || row.problem == key || row.status != "ok" || row.median_us <= 0 ||
           !templates.contains(row.template_id);
  });
  if (rows.empty()) return {};
  if (rows.size() > kMostRows) rows.resize(kMostRows);
  std::map<std::string, Artifact, std::less<>> artifacts;
  for (const ArtifactRow& row : cache.list_artifacts())
    if (auto artifact = from_row(row)) artifacts.emplace(row.key, std::move(*artifact));
  std::vector<Observation> found;
  for (const MeasurementRow& row : rows)
    if (const auto artifact = artifacts.find(row.artifact_key); artifact != artifacts.end())
      if (auto seen = observation(row, artifact->second, space)) found.push_back(std::move(*seen));
  return found;
}

}  // namespace wyvern
