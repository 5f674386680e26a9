#include "tools/wyvern/describe.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>

#include "runtime/problem_fields.hpp"

namespace wyvern::cli {
namespace {

Json to_json(const Value& value) {
  if (const bool* flag = std::get_if<bool>(&value)) return *flag;
  if (const std::int64_t* number = std::get_if<std::int64_t>(&value)) return *number;
  return to_string(value);
}

// A field's value as a document has it.
Json plain(std::monostate) { return nullptr; }
template <class T>
Json plain(const T& value) {
  if constexpr (std::is_enum_v<T>)
    return to_string(value);
  else
    return value;
}
template <class T>
Json plain(const std::optional<T>& value) {
  return value ? plain(*value) : Json(nullptr);
}

}  // namespace

Json to_json(const Values& values) {
  Json json = Json::object();
  for (const auto& [name, value] : values.items()) json[name] = to_json(value);
  return json;
}

Json to_json(const Problem& p) {
  Json json = Json::object();
  for (const ProblemField& field : problem_fields()) {
    const std::string name(field.shown_name.empty() ? field.name : field.shown_name);
    if (field.shown != nullptr)
      json[name] = std::visit([](const auto& value) { return plain(value); }, field.shown(p));
    else
      json[name] = visit_field(field, p, [](const auto& value) { return plain(value); });
  }
  json["key"] = problem_key(p).to_string();
  return json;
}

Json to_json(const Plan& plan) {
  Json json = Json::array();
  for (const PlanStep& step : plan)
    json.push_back({{"template", step.template_id}, {"config", to_json(step.config)}});
  return json;
}

Json to_json(const DeviceInfo& d) {
  return {{"name", d.name},
          {"kind", d.kind},
          {"model", d.model},
          {"arch", d.arch},
          {"driver", d.driver},
          {"units", d.units},
          {"memory_bytes", d.memory_bytes},
          {"clock_ghz", d.clock_ghz},
          {"peak_bytes_per_s", d.peak_bytes_per_s},
          {"usable", d.problem.empty()},
          {"problem", d.problem}};
}

std::string plan_text(const Plan& plan) {
  std::size_t width = 0;
  for (const PlanStep& step : plan) width = std::max(width, step.template_id.size());
  std::string text;
  for (const PlanStep& step : plan)
    text += fmt::format("  {:<{}}  {}\n", step.template_id, width, step.config.to_string());
  return text;
}

std::string_view origin_text(Origin origin) {
  switch (origin) {
    case Origin::exact: return "exact winner";
    case Origin::nearest: return "nearest winner";
    case Origin::fallback: return "default configs";
    case Origin::given: return "given";
  }
  return "?";
}

}  // namespace wyvern::cli
