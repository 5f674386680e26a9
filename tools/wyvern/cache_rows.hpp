// Rows of the cache as JSON and as text.
#pragma once

#include <string>

#include "cache/cache.hpp"
#include "tools/wyvern/output.hpp"

namespace wyvern::cli {

/// A row as `cache list` shows it; `cache show` takes its "id".
Json to_json(const ArtifactRow& row);
Json to_json(const MeasurementRow& row);
Json to_json(const WinnerRow& row);
Json to_json(const Setting& setting);

/// A stored JSON text as JSON, or as the text it is.
Json parsed(const std::string& text);

/// "family/tokens=8192/sequences=1".
std::string problem_of(const WinnerRow& row);

/// Runs work(cache) on the user's cache. If the work succeeds, the cache's own warnings are printed
/// as notes; if it throws, the error alone has them.
template <class Work>
auto with_cache(const Work& work) {
  std::string said;
  Cache cache;
  cache.on_degraded([&said](const std::string& sentence) { said = sentence; });
  auto result = work(cache);
  if (!said.empty()) warn(said);
  return result;
}

}  // namespace wyvern::cli
