#include "tools/wyvern/cache_rows.hpp"

#include <fmt/format.h>

#include "runtime/base/json_text.hpp"

namespace wyvern::cli {

/// A stored JSON text as JSON, or as the text it is.
Json parsed(const std::string& text) {
  if (is_too_deep(text)) return text;
  Json json = Json::parse(text, nullptr, false);
  return json.is_discarded() ? Json(text) : json;
}

Json to_json(const ArtifactRow& row) {
  return {{"id", row.key},        {"template", row.template_id},  {"target", row.target},
          {"config", row.config}, {"compile_ms", row.compile_ms}, {"created", row.created}};
}

std::string problem_of(const WinnerRow& row) {
  return fmt::format("{}/tokens={}/sequences={}", row.family, row.tokens, row.sequences);
}

Json to_json(const Setting& setting) {
  return {{"B", setting.B},
          {"T", setting.T},
          {"N", setting.N},
          {"lengths", setting.lengths},
          {"host", setting.host},
          {"unit", setting.unit},
          {"clock_mhz", setting.clock_mhz},
          {"memory_clock_mhz", setting.memory_clock_mhz},
          {"power_limit_w", setting.power_limit_w},
          {"regime", setting.regime}};
}

Json to_json(const MeasurementRow& row) {
  return {{"id", fmt::format("m{}", row.id)}, {"device", row.device},  {"problem", row.problem},
          {"template", row.template_id},      {"config", row.config},  {"status", row.status},
          {"median_us", row.median_us},       {"created", row.created}};
}

Json to_json(const WinnerRow& row) {
  return {{"id", fmt::format("w{}", row.id)},
          {"device", row.device},
          {"problem", problem_of(row)},
          {"median_us", row.median_us},
          {"default_us", row.default_us},
          {"plan", parsed(row.plan)},
          {"created", row.created}};
}

}  // namespace wyvern::cli
