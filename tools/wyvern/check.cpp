#include "tools/wyvern/check.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace wyvern::cli {

Oracle::Oracle(const Problem& problem, const Arguments& host)
    : problem_(problem), reference_(reference(problem, host)) {}

Json Oracle::check(const Arguments& host) const {
  Json checks = Json::array();
  for (const TensorSpec& spec : tensor_specs(problem_)) {
    const auto wanted = reference_.find(spec.name);
    if (wanted == reference_.end()) continue;
    const double error = relative_error(host.tensor(spec.name), wanted->second);
    const double bound = error_bound(problem_, spec.name);
    const bool finite = std::isfinite(error);
    checks.push_back({{"quantity", spec.name},
                      {"error", finite ? Json(error) : Json(nullptr)},
                      {"bound", bound},
                      {"ok", finite && error <= bound}});
  }
  return checks;
}

bool passed(const Json& checks) {
  return std::all_of(checks.begin(), checks.end(),
                     [](const Json& row) { return row["ok"].get<bool>(); });
}

std::string check_text(const Json& checks) {
  Table table({"quantity", "error", "bound", "ok"});
  for (const Json& row : checks)
    table.row(
        {row["quantity"],
         row["error"].is_null() ? "not finite" : fmt::format("{:.2e}", row["error"].get<double>()),
         fmt::format("{:.0e}", row["bound"].get<double>()), row["ok"].get<bool>() ? "yes" : "NO"});
  return table.text();
}

}  // namespace wyvern::cli
