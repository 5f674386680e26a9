#include "templates/template.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>

#include "templates/embedded.hpp"
#include "templates/legality.hpp"

namespace wyvern {
namespace {

bool agrees(const Config& config, std::string_view name, std::int64_t wanted) {
  return wanted == 0 || !config.contains(name) || config.integer(name) == wanted;
}

bool within(const Config& config, Precision floor, PlanShape shape) {
  const Value* precision = config.find("precision");
  if (precision != nullptr && std::get<Precision>(*precision) < floor) return false;
  return agrees(config, "BT", shape.BT) && agrees(config, "SEG", shape.SEG);
}

/// Empty, or why the config is not one value of each tunable.
std::string values_problem(const Template& t, const Config& config) {
  for (const Tunable& tunable : t.tunables) {
    const Value* value = config.find(tunable.name);
    if (value == nullptr) return fmt::format("it has no {}", tunable.name);
    if (std::ranges::find(tunable.values, *value) != tunable.values.end()) continue;
    std::string legal;
    for (const Value& each : tunable.values) legal += (legal.empty() ? "" : ", ") + to_string(each);
    return fmt::format("{} is {}; it must be one of {}", tunable.name, to_string(*value), legal);
  }
  if (config.items().size() == t.tunables.size()) return {};
  for (const auto& [name, value] : config.items())
    if (t.tunable(name) == nullptr)
      return fmt::format("'{}' is not one of the template's tunables", name);
  return {};
}

/// The shape's value, or the tunable's first value where the shape leaves it open; nothing if the
/// tunable lacks the value.
std::optional<std::int64_t> start_value(const Template& t, std::string_view name,
                                        std::int64_t wanted) {
  const Tunable* tunable = t.tunable(name);
  if (tunable == nullptr) return wanted;
  if (wanted == 0) return std::get<std::int64_t>(tunable->values.front());
  if (std::ranges::find(tunable->values, Value{wanted}) == tunable->values.end()) return {};
  return wanted;
}

/// The value of a tunable in a spec, by the tunable's name; nothing for a name that only a test
/// has.
std::optional<Value> value_by_name(const Spec& spec, std::string_view name) {
  for (const TunableName& known : all_tunables())
    if (known.name == name) return value_of(known, spec);
  return {};
}

std::vector<Template> registered_templates() {
  std::vector<Template> all = detail::collect_templates();
  for (Template& t : all) register_template(t);
  std::sort(all.begin(), all.end(),
            [](const Template& a, const Template& b) { return a.id() < b.id(); });
  return all;
}

}  // namespace

std::string_view to_string(DeviceKind kind) noexcept {
  return kind == DeviceKind::cpu ? "cpu" : "cuda";
}

std::string Needs::missing(const Limits& limits) const {
  const char* what = wgmma && !limits.wgmma                   ? "wgmma, which only sm_90a has"
                     : tensor_copies && !limits.tensor_copies ? "TMA, which sm_90 and later have"
                     : clusters && limits.max_cluster == 1
                         ? "thread block clusters, which sm_90 and later have"
                         : nullptr;
  return what == nullptr ? std::string() : fmt::format("it needs {}", what);
}

std::int64_t chunk_slots(std::int64_t B, std::int64_t T, std::int64_t N, bool packed,
                         std::int64_t BT) {
  return packed ? T / BT + N : B * ((T + BT - 1) / BT);
}

Values Template::values_of(const Constants& problem) const {
  Values result;
  for (const AnyConstant& constant : constants)
    result.set(std::string(name_of(constant)), value_of(constant, problem));
  return result;
}

bool Template::carries_out(std::string_view stage) const {
  return std::any_of(covers.begin(), covers.end(),
                     [&](const Cover& cover) { return cover.stage->name == stage; });
}

const Tunable* Template::tunable(std::string_view tunable_name) const {
  for (const Tunable& t : tunables)
    if (t.name == tunable_name) return &t;
  return nullptr;
}

Config Template::compiled(const Config& config) const {
  Config part;
  for (const auto& [tunable, value] : config.items()) {
    const Tunable* const own = this->tunable(tunable);
    if (own == nullptr || !own->at_launch) part.set(tunable, value);
  }
  return part;
}

std::string Template::problem(const Spec& spec, const Limits& limits) const {
  std::string missing = needs.missing(limits);
  return missing.empty() && illegal ? illegal(spec, limits) : missing;
}

const std::vector<Template>& all_templates() {
  // Never destroyed, nor are the stages: the last threads may prepare while the process ends.
  static const auto& templates = *new std::vector<Template>(registered_templates());
  return templates;
}

const Template* find_template(std::string_view id) {
  for (const Template& t : all_templates())
    if (t.name.size() + 1 + t.variant.size() == id.size() && id.starts_with(t.name) &&
        id[t.name.size()] == '.' && id.ends_with(t.variant))
      return &t;
  return nullptr;
}

const std::vector<const StageDefinition*>& all_stages() {
  static const auto& stages = *new std::vector<const StageDefinition*>([] {
    std::vector<const StageDefinition*> all;
    for (const Template& t : all_templates())
      for (const Cover& cover : t.covers) all.push_back(cover.stage);
    const auto name = [](const StageDefinition* stage) { return stage->name; };
    std::ranges::sort(all, {}, name);
    const auto repeated = std::ranges::unique(all, {}, name);
    all.erase(repeated.begin(), repeated.end());
    return all;
  }());
  return stages;
}

std::vector<Config> space(const Template& t, const Constants& constants, const Limits& limits,
                          Precision floor, PlanShape shape) {
  if (!t.needs.missing(limits).empty()) return {};
  std::vector<Config> configs{Config{}};
  for (const Tunable& tunable : t.tunables) {
    std::vector<Config> extended;
    extended.reserve(configs.size() * tunable.values.size());
    for (const Config& config : configs)
      for (const Value& value : tunable.values) {
        extended.push_back(config);
        extended.back().set(tunable.name, value);
        if (!within(extended.back(), floor, shape)) extended.pop_back();
      }
    configs = std::move(extended);
  }
  std::erase_if(configs, [&](const Config& config) {
    const Spec spec(constants, config);
    return (t.illegal && !t.illegal(spec, limits).empty()) || (t.redundant && t.redundant(spec));
  });
  return configs;
}

std::string config_problem(const Template& t, const Config& config, const Constants& constants,
                           const Limits& limits, Precision floor) {
  if (std::string reason = values_problem(t, config); !reason.empty()) return reason;
  if (!within(config, floor, {}))
    return fmt::format("precision is {}; it must be at least {}, the problem's floor",
                       to_string(config.precision("precision")), to_string(floor));
  return t.problem(Spec(constants, config), limits);
}

std::optional<Config> default_config(const Template& t, const Constants& constants,
                                     const Limits& limits, Precision floor, const Workload& work) {
  if (!t.needs.missing(limits).empty()) return {};
  const PlanShape shape = work.shape;
  const auto BT = start_value(t, "BT", shape.BT), SEG = start_value(t, "SEG", shape.SEG);
  if (!BT || !SEG) return {};
  if (!t.cost) {
    Spec spec(constants);
    spec.BT = *BT;
    spec.SEG = *SEG;
    t.fallback(spec, limits);
    Config config;
    for (const Tunable& tunable : t.tunables)
      if (const auto value = value_by_name(spec, tunable.name)) config.set(tunable.name, *value);
    if (within(config, floor, shape) && config_problem(t, config, constants, limits, floor).empty())
      return config;
  }
  std::vector<Config> legal = space(t, constants, limits, floor, shape);
  if (legal.empty()) return {};
  if (!t.cost) return std::move(legal.front());
  return std::move(*std::ranges::min_element(legal, {}, [&](const Config& config) {
    return t.cost(Spec(constants, config), work, limits);
  }));
}

}  // namespace wyvern
