#include "autotune/protocol.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>

#include "runtime/plan.hpp"
#include "runtime/problem_fields.hpp"

namespace wyvern {
namespace {

using nlohmann::json;

template <class T>
json text_of(const T& value) {
  return std::string(to_string(value));
}

struct Writer {
  json& out;
  void operator()(const std::string& name, DType value) const { out[name] = text_of(value); }
  void operator()(const std::string& name, const std::optional<Precision>& value) const {
    if (value) out[name] = text_of(*value);
  }
  void operator()(const std::string& name, const std::optional<Activation>& value) const {
    if (value) out[name] = text_of(*value);
  }
  void operator()(const std::string& name, const std::optional<DType>& value) const {
    if (value) out[name] = text_of(*value);
  }
  void operator()(const std::string& name, Pass value) const { out[name] = text_of(value); }
  template <class T>
  void operator()(const std::string& name, const std::optional<T>& value) const {
    if (value) out[name] = *value;
  }
  template <class T>
  void operator()(const std::string& name, const T& value) const {
    out[name] = value;
  }
};

struct Reader {
  const json& in;
  bool required;  ///< counts of every operator and pass are
  void operator()(const std::string& name, DType& value) const {
    if (required || in.contains(name)) value = parse_dtype(in.at(name).get<std::string>()).value();
  }
  void operator()(const std::string& name, std::optional<Precision>& value) const {
    if (in.contains(name)) value = parse_precision(in.at(name).get<std::string>()).value();
  }
  void operator()(const std::string& name, std::optional<Activation>& value) const {
    if (in.contains(name)) value = parse_activation(in.at(name).get<std::string>()).value();
  }
  void operator()(const std::string& name, std::optional<DType>& value) const {
    if (in.contains(name)) value = parse_dtype(in.at(name).get<std::string>()).value();
  }
  void operator()(const std::string& name, Pass& value) const {
    const auto text = in.at(name).get<std::string>();
    constexpr std::array kPasses{Pass::forward, Pass::backward, Pass::recurrent};
    const auto found = std::find_if(kPasses.begin(), kPasses.end(),
                                    [&](Pass pass) { return text == to_string(pass); });
    if (found == kPasses.end()) throw std::bad_optional_access();
    value = *found;
  }
  template <class T>
  void operator()(const std::string& name, std::optional<T>& value) const {
    if (in.contains(name)) value = in.at(name).get<T>();
  }
  /// An option that the document lacks came after it: rows and recordings outlive builds.
  void operator()(const std::string& name, bool& value) const {
    if (in.contains(name)) in.at(name).get_to(value);
  }
  void operator()(const std::string& name, std::int64_t& value) const {
    if (required || in.contains(name)) in.at(name).get_to(value);
  }
  void operator()(const std::string& name, std::string& value) const { in.at(name).get_to(value); }
};

}  // namespace

std::optional<json> message_from(std::string_view line) {
  constexpr int kDeepest = 8;
  bool shallow = true;
  const auto keep = [&](int depth, json::parse_event_t, json&) {
    shallow = shallow && depth <= kDeepest;
    return shallow;
  };
  json message = json::parse(line, keep, /*allow_exceptions=*/false);
  if (!shallow || !message.is_object()) return {};
  return message;
}

json to_json(const Problem& problem) {
  json out;
  for (const ProblemField& field : problem_fields())
    visit_field(field, problem,
                [&](const auto& value) { Writer{out}(std::string(field.name), value); });
  return out;
}

Problem problem_from(const json& in) {
  Problem problem;
  try {
    for (const ProblemField& field : problem_fields()) {
      const bool required = field.scope.passes == 0b111 && field.scope.has == nullptr;
      visit_field(field, problem,
                  [&](auto& value) { Reader{in, required}(std::string(field.name), value); });
    }
  } catch (const json::exception& error) {
    throw Error(ErrorKind::kBadInput, fmt::format("problem is {}: {}", in.dump(), error.what()));
  } catch (const std::bad_optional_access&) {
    throw Error(
        ErrorKind::kBadInput,
        fmt::format("problem is {}; its pass, dtypes, precision and output_norm must be known "
                    "names",
                    in.dump()));
  }
  return problem;
}

json to_json(const Plan& plan) { return json::parse(plan_to_json(plan)); }

Plan plan_from(const json& in) {
  if (const auto plan = plan_from_json(in.dump())) return *plan;
  throw Error(ErrorKind::kBadInput,
              fmt::format("plan is {}; it must list templates of this build", in.dump()));
}

json to_json(const Outcome& outcome) {
  return {{"status", to_string(outcome.status)}, {"detail", outcome.detail},
          {"samples_us", outcome.samples},       {"clocks_mhz", outcome.clocks_mhz},
          {"pace_us", outcome.pace_us},          {"error", outcome.error}};
}

std::optional<Outcome> outcome_from(const json& in) {
  Outcome outcome;
  try {
    const auto status = parse_status(in.at("status").get<std::string>());
    if (!status) return {};
    outcome.status = *status;
    outcome.detail = in.at("detail").get<std::string>();
    outcome.samples = in.at("samples_us").get<std::vector<double>>();
    outcome.clocks_mhz = in.value("clocks_mhz", std::vector<double>());
    outcome.pace_us = in.value("pace_us", 0.0);
    const json& error = in.at("error");
    outcome.error = error.is_null() ? std::numeric_limits<double>::infinity() : error.get<double>();
  } catch (const json::exception&) {
    return {};
  }
  const bool timed =
      !outcome.samples.empty() && std::all_of(outcome.samples.begin(), outcome.samples.end(),
                                              [](double sample) { return sample > 0; });
  if (outcome.status == Status::ok && !timed) return {};
  return outcome;
}

}  // namespace wyvern
