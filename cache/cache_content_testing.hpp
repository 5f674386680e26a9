// The expected content of a cache: the oracle of the tests that let its disk fail.
#pragma once

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cache/cache.hpp"
#include "cache/cache_testing.hpp"

namespace wyvern::testing {

/// Rows by their look-up key, each as one text of all its members. Winners that answer;
/// measurements are added and never replaced, so that each is found by its own text.
struct Content {
  std::map<std::string, std::string> artifacts, measurements, winners;

  friend bool operator==(const Content&, const Content&) = default;

  void store(const ArtifactRow& row) { artifacts[row.key] = text(row); }
  void store(const MeasurementRow& row) { measurements[text(row)] = text(row); }
  void store(const WinnerRow& row) {
    winners[row.family + '\n' + std::to_string(row.tokens) + '\n' + std::to_string(row.sequences)] =
        text(row);
  }
  std::size_t size() const { return artifacts.size() + measurements.size() + winners.size(); }

  static std::string text(const ArtifactRow& row) {
    return joined({row.key, row.template_id, row.target, row.config, row.metadata, row.code,
                   std::to_string(row.compile_ms)});
  }
  static std::string text(const MeasurementRow& row) {
    std::vector<std::string> fields{row.device,
                                    row.problem,
                                    row.template_id,
                                    row.config,
                                    row.artifact_key,
                                    row.driver,
                                    row.status,
                                    row.detail,
                                    std::to_string(row.median_us),
                                    std::to_string(row.error)};
    for (const double sample : row.samples_us) fields.push_back(std::to_string(sample));
    return joined(fields);
  }
  static std::string text(const WinnerRow& row) {
    return joined({row.device, row.family, std::to_string(row.tokens),
                   std::to_string(row.sequences), row.plan, std::to_string(row.median_us),
                   std::to_string(row.default_us), row.driver});
  }

 private:
  static std::string joined(const std::vector<std::string>& fields) {
    std::string all;
    for (const std::string& field : fields) all += field + '\n';
    return all;
  }
};

/// All that can be found, artifacts each by its key.
inline Content content_of(Cache& cache) {
  Content content;
  for (const ArtifactRow& row : cache.list_artifacts()) {
    if (const auto found = cache.find_artifact(row.key)) content.store(*found);
  }
  for (const MeasurementRow& row : cache.list_measurements()) content.store(row);
  for (const WinnerRow& row : cache.list_winners()) content.store(row);
  return content;
}

/// Whether all of `part` stands in `whole` as it is.
inline bool is_part(const Content& part, const Content& whole) {
  const auto within = [](const auto& some, const auto& all) {
    for (const auto& [key, text] : some) {
      const auto at = all.find(key);
      if (at == all.end() || at->second != text) return false;
    }
    return true;
  };
  return within(part.artifacts, whole.artifacts) && within(part.measurements, whole.measurements) &&
         within(part.winners, whole.winners);
}

}  // namespace wyvern::testing
