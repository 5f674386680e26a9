#include "tools/wyvern/check.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "runtime/operators/operator.hpp"
#include "runtime/reference_inputs.hpp"

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

Doubts doubts_about(const Problem& problem, const Arguments& host) {
  Doubts doubts;
  for (const TensorSpec& spec : tensor_specs(problem)) {
    if (!spec.present || spec.access == TensorAccess::out) continue;
    const TensorRule& rule = definition_of(problem).rule(spec.name);
    if (spec.dtype == DType::int32 || spec.dtype == DType::int64) continue;
    const TensorView& view = host.tensor(spec.name);
    std::vector<double> values(static_cast<std::size_t>(view.elements()));
    load_row(view, 0, values);
    const auto bad = std::ranges::find_if_not(values, [](double x) { return std::isfinite(x); });
    if (bad != values.end()) {
      doubts.not_finite.push_back(fmt::format("the input {} is not finite: its element {} is {}",
                                              spec.name, std::distance(values.begin(), bad), *bad));
      continue;
    }
    if (values.empty()) continue;
    const auto [least, most] = std::ranges::minmax(values);
    if (rule.holds == Quantity::gates && !problem.use_gate_in_kernel && most > 0)
      doubts.others.push_back(fmt::format(
          "{} is up to {:.3g}, and gates must be at most 0: what is computed with it is undefined",
          spec.name, most));
    // The sum of squares of a row is computed in fp32.
    if (rule.holds == Quantity::directions && problem.use_qk_l2norm &&
        std::max(-least, most) > std::sqrt(std::numeric_limits<float>::max()))
      doubts.others.push_back(fmt::format(
          "{} has an element of {:.3g}, whose square is beyond fp32: the norm makes its "
          "row 0",
          spec.name, std::max(-least, most)));
  }
  return doubts;
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
