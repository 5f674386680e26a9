#include "tools/wyvern/describe.hpp"

#include <algorithm>

namespace wyvern::cli {
namespace {

Json to_json(const Value& value) {
  if (const bool* flag = std::get_if<bool>(&value)) return *flag;
  if (const std::int64_t* number = std::get_if<std::int64_t>(&value)) return *number;
  return to_string(value);
}

}  // namespace

Json to_json(const Values& values) {
  Json json = Json::object();
  for (const auto& [name, value] : values.items()) json[name] = to_json(value);
  return json;
}

Json to_json(const Problem& p) {
  Json json{{"operator", p.op},
            {"pass", to_string(p.pass)},
            {"B", p.B},
            {"T", p.T},
            {"H", p.H},
            {"HV", p.HV},
            {"K", p.K},
            {"V", p.V},
            {"N", p.N},
            {"packed", p.packed},
            {"dtype", to_string(p.dtype)},
            {"beta_dtype", to_string(p.beta_dtype)},
            {"g_dtype", to_string(p.g_dtype)},
            {"state_dtype", to_string(p.state_dtype)},
            {"scale", scale_of(p)},
            {"precision", to_string(precision_floor(p))},
            {"use_qk_l2norm", p.use_qk_l2norm},
            {"use_gate_in_kernel", p.use_gate_in_kernel},
            {"has_A_log", p.use_gate_in_kernel && p.has_A_log},
            {"has_dt_bias", p.has_dt_bias},
            {"lower_bound", p.lower_bound ? Json(*p.lower_bound) : Json(nullptr)},
            {"safe_gate", p.safe_gate},
            {"use_beta_sigmoid", p.use_beta_sigmoid},
            {"allow_neg_eigval", p.allow_neg_eigval},
            {"initial_state", p.initial_state},
            {"output_final_state", p.output_final_state},
            {"state_v_first", p.state_v_first},
            {"chunk_size", p.chunk_size ? Json(*p.chunk_size) : Json(nullptr)},
            {"disable_recompute", p.disable_recompute},
            {"return_intermediate_states", p.return_intermediate_states},
            {"inplace_state", p.inplace_state},
            {"state_index", p.state_index},
            {"state_slots", p.state_index ? Json(p.state_slots) : Json(nullptr)}};
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
