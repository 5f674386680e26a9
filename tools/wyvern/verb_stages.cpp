#include <wyvern/problem.hpp>

#include <fmt/ranges.h>

#include <map>
#include <set>

#include "compiler/compiler.hpp"
#include "runtime/plan.hpp"
#include "templates/template.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/stage_problem.hpp"

namespace wyvern::cli {
namespace {

constexpr std::string_view kSpaceOf =
    "legal configs for bf16, H=16, HV=32, K=V=128 on sm_90a (CUDA) and on this host (CPU)";

Json template_json(const Template& t) {
  Json tunables = Json::object();
  for (const Tunable& tunable : t.tunables) {
    Json values = Json::array();
    for (const Value& value : tunable.values) {
      Values one;
      one.set("value", value);
      values.push_back(to_json(one)["value"]);
    }
    tunables[tunable.name] = std::move(values);
  }
  Json stages = Json::array();
  for (const Cover& cover : t.covers) stages.push_back(cover.stage->name);
  const Constants constants = problem_constants(stage_problem(t));
  return {{"id", t.id()},
          {"variant", t.variant},
          {"device", to_string(t.device)},
          {"stages", std::move(stages)},
          {"summary", t.summary},
          {"tunables", std::move(tunables)},
          {"space_size", space(t, constants, usual_target(t.device).limits).size()}};
}

/// Stages in the order an operator uses them, then the other stages by name. A fused group is
/// listed under its own name and under each stage it covers.
Json collect() {
  std::vector<std::string> names;
  const auto add = [&](const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const Problem& problem : stage_problems())
    for (const StageUse& use : stage_uses(problem)) add(std::string(use.stage->name));
  for (const Template& t : all_templates()) add(t.name);

  Json stages = Json::array();
  for (const std::string& name : names) {
    Json templates = Json::array();
    for (const Template& t : all_templates())
      if (t.name == name) templates.push_back(template_json(t));
    for (const Template& t : all_templates())
      if (t.name != name && t.carries_out(name)) templates.push_back(template_json(t));
    if (!templates.empty()) stages.push_back({{"name", name}, {"templates", std::move(templates)}});
  }
  return {{"stages", std::move(stages)}, {"space_of", kSpaceOf}};
}

int list(bool json) {
  const Json document = collect();
  if (json) {
    print_document(document);
    return kDone;
  }
  for (const Json& stage : document["stages"]) {
    say("{}", stage["name"].get<std::string>());
    for (const Json& t : stage["templates"]) {
      std::string tunables;
      for (const auto& [name, values] : t["tunables"].items()) {
        std::vector<std::string> texts;
        for (const Json& value : values)
          texts.push_back(value.is_string() ? value.get<std::string>() : value.dump());
        tunables += fmt::format(" {}={}", name, fmt::join(texts, "|"));
      }
      say("  {:<28} {:>5} configs {}", t["id"].get<std::string>(),
          t["space_size"].get<std::size_t>(), tunables);
    }
  }
  say("({})", kSpaceOf);
  return kDone;
}

}  // namespace

void add_stages(Command& command) {
  command.verb("stages", "each stage, its templates and the size of their spaces", list);
}

}  // namespace wyvern::cli
