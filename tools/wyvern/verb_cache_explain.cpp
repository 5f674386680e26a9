#include <wyvern/error.hpp>
#include <wyvern/runtime.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cache/cache.hpp"
#include "cache/rows.hpp"
#include "cache/shipped_code.hpp"
#include "compiler/compiler.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "runtime/plan_source.hpp"
#include "tools/wyvern/cache_rows.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/output.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {
namespace {

struct Flags {
  SelectionFlags selection;
  OptionFlags options;
  std::optional<std::string> device;
};

// ---- Which fields of two keys differ

using Fields = std::map<std::string, std::string>;

constexpr std::string_view kConstant = "constant ";  ///< before the name of a kernel's

/// "a=1,b=2" by names, also names without a value: pieces between the separators.
void add_fields(std::string_view text, char separator, std::string_view prefix, Fields& fields) {
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(separator, at), text.size());
    const std::string_view piece = text.substr(at, end - at);
    at = end + 1;
    if (piece.empty()) continue;
    const std::size_t equals = piece.find('=');
    if (equals == piece.npos)
      fields[fmt::format("{}{}", prefix, piece)] = "yes";
    else
      fields[fmt::format("{}{}", prefix, piece.substr(0, equals))] = piece.substr(equals + 1);
  }
}

/// A problem's family by its pieces: operator, pass, H, HV, K, V, dtypes, options.
Fields fields_of_family(const std::string& family) {
  Fields fields;
  std::string rest;
  std::size_t at = 0;
  for (const char* name : {"operator", "pass"}) {
    const std::size_t end = std::min(family.find('/', at), family.size());
    fields[name] = family.substr(at, end - at);
    at = std::min(end + 1, family.size());
  }
  rest = family.substr(at);
  std::replace(rest.begin(), rest.end(), '/', ',');
  add_fields(rest, ',', "", fields);
  return fields;
}

Fields fields_of(const WinnerRow& row) {
  Fields fields = fields_of_family(row.family);
  fields["device"] = device_text(row.device);
  fields["tokens"] = std::to_string(row.tokens);
  fields["sequences"] = std::to_string(row.sequences);
  return fields;
}

Fields fields_of(const ArtifactRow& row) {
  Fields fields{{"template", row.template_id}, {"target", row.target}};
  add_fields(row.config, ',', "", fields);
  const Json metadata = parsed(row.metadata);
  if (metadata.is_object() && metadata.contains("constants") && metadata["constants"].is_string())
    add_fields(metadata["constants"].get<std::string>(), ',', kConstant, fields);
  // Those that its source has not, such as head counts, are of the problem it was compiled for.
  if (const Template* const t = find_template(row.template_id)) {
    const Values own = t->values_of({});
    std::erase_if(fields, [&](const auto& field) {
      return field.first.starts_with(kConstant) &&
             !own.contains(field.first.substr(kConstant.size()));
    });
  }
  return fields;
}

/// [{"field","wanted","found"}]: null where one has no such field.
Json differences(const Fields& wanted, const Fields& found) {
  std::set<std::string> names;
  for (const auto& [name, value] : wanted) names.insert(name);
  for (const auto& [name, value] : found) names.insert(name);
  Json list = Json::array();
  for (const std::string& name : names) {
    const auto x = wanted.find(name), y = found.find(name);
    if (x != wanted.end() && y != found.end() && x->second == y->second) continue;
    list.push_back({{"field", name},
                    {"wanted", x == wanted.end() ? Json(nullptr) : Json(x->second)},
                    {"found", y == found.end() ? Json(nullptr) : Json(y->second)}});
  }
  return list;
}

/// The one of the rows with the fewest differences.
template <class Row>
std::optional<std::pair<Row, Json>> nearest(const Fields& wanted, const std::vector<Row>& rows) {
  std::optional<std::pair<Row, Json>> best;
  for (const Row& row : rows) {
    Json list = differences(wanted, fields_of(row));
    if (!best || list.size() < best->second.size()) best = {row, std::move(list)};
  }
  return best;
}

// ---- The answer

Json candidate_json(const Contender& one, const WinnerRow& wanted, const DeviceInfo& device) {
  const WinnerRow& row = one.row;
  const bool other_kernels = one.kinship == Kinship::kernels;
  const std::string why =
      !one.problem.empty() ? fmt::format("its plan cannot be used: {}", one.problem)
      : one.answers ? (other_kernels ? "it is the nearest problem, and answers" : "it answers")
      : one.kinship == Kinship::exact ? "one of an earlier layer answers"
                                      : "one that is nearer, or of an earlier layer, answers";
  return {
      {"layer", one.layer},           {"file", one.file.empty() ? Json(nullptr) : Json(one.file)},
      {"device", row.device},         {"family", row.family},
      {"tokens", row.tokens},         {"sequences", row.sequences},
      {"distance", one.distance},     {"ratio", rank_of(row)},
      {"driver", row.driver},         {"same_driver", row.driver == device.driver},
      {"created", row.created},       {"host", row.setting.host},
      {"plan", parsed(row.plan)},     {"usable", one.problem.empty()},
      {"other_shape", other_kernels}, {"differs", differences(fields_of(wanted), fields_of(row))},
      {"answers", one.answers},       {"why", why}};
}

/// Whether the plan's kernels are compiled, and where not, the differences from the nearest
/// compiled one.
Json kernels(const Cache& cache, const Device& device, const Problem& problem, const Plan& plan) {
  const Target& target = device.impl().target();
  const CheckedPlan checked = check_plan(problem, stage_uses(problem), plan, target);
  const std::vector<ArtifactRow> artifacts = cache.list_artifacts();
  Json list = Json::array();
  for (std::size_t i = 0; i < plan.size(); ++i) {
    Json one{{"template", plan[i].template_id}, {"config", plan[i].config.to_string()}};
    try {
      const CompileRequest request{find_template(plan[i].template_id), checked.constants[i],
                                   plan[i].config, target};
      one["shipped"] = ShippedCode::shared()->find(target.name(), code_key(request)).has_value();
      one["artifact"] = artifact_key(request);
      one["cached"] = cache.find_artifact(one["artifact"].get<std::string>()).has_value();
      if (!one["cached"].get<bool>()) {
        ArtifactRow wanted;
        wanted.template_id = plan[i].template_id;
        wanted.target = target.name();
        wanted.config = plan[i].config.to_string();
        wanted.metadata = Json{{"constants", request.constants.values().to_string()}}.dump();
        std::vector<ArtifactRow> alike;
        for (const ArtifactRow& row : artifacts)
          if (row.template_id == wanted.template_id) alike.push_back(row);
        if (auto near = nearest(fields_of(wanted), alike)) {
          if (near->second.empty())
            near->second.push_back({{"field", "source or compiler"},
                                    {"wanted", "this build's"},
                                    {"found", "another"}});
          one["nearest"] = {{"artifact", near->first.key}, {"differs", near->second}};
        }
      }
    } catch (const Error& error) {
      one["artifact"] = nullptr;
      one["cached"] = false;
      one["problem"] = error.what();
    }
    list.push_back(std::move(one));
  }
  return list;
}

struct Answer {
  Plan plan;
  std::string layer = "default", origin = "default", reason;
};

std::string reason_of(const Contender& one, bool same_driver) {
  switch (one.kinship) {
    case Kinship::exact:
      return same_driver ? "it was tuned for this problem on this device"
                         : "it was tuned for this problem with another driver";
    case Kinship::extents: return "it was tuned for the nearest extents of the same family";
    case Kinship::kernels: break;
  }
  return "nothing of its family is usable, and it was tuned for the nearest problem whose plan can "
         "serve";
}

Answer answer_of(const std::vector<Contender>& all, const Device& device, const Problem& problem) {
  Answer answer;
  const auto one = std::ranges::find_if(all, &Contender::answers);
  if (one == all.end()) {
    answer.reason = all.empty() ? "nothing of its family, and no problem near it, is tuned for "
                                  "this device"
                                : fmt::format("the plan of layer {} cannot be used: {}",
                                              all.front().layer, all.front().problem);
    answer.plan = default_plan(problem, device.impl().target());
    return answer;
  }
  const bool same_driver = one->row.driver == device.info().driver;
  answer.layer = one->layer;
  answer.origin = one->kinship == Kinship::exact && same_driver ? "exact" : "nearest";
  answer.reason = reason_of(*one, same_driver);
  answer.plan = plan_from_json(one->row.plan).value();
  return answer;
}

Json explain(const Cache& cache, const Device& device, const Problem& problem,
             const std::vector<Contender>& all, const Answer& answer) {
  const ProblemKey key = problem_key(problem);
  WinnerRow wanted;
  wanted.device = device.info().key;
  wanted.family = key.family, wanted.tokens = key.tokens, wanted.sequences = key.sequences;
  Json candidates = Json::array();
  for (const Contender& one : all) candidates.push_back(candidate_json(one, wanted, device.info()));
  Json document{{"operator", problem.op},
                {"device", device.info().name},
                {"model", device.info().model},
                {"device_key", device.info().key},
                {"problem", to_json(problem)},
                {"layer", answer.layer},
                {"origin", answer.origin},
                {"reason", answer.reason},
                {"plan", to_json(answer.plan)},
                {"candidates", std::move(candidates)},
                {"nearest", nullptr},
                {"kernels", kernels(cache, device, problem, answer.plan)},
                {"cache", cache.file().string()},
                {"cache_status", cache.status()}};
  if (answer.origin == "exact") return document;
  if (const auto near = nearest(fields_of(wanted), cache.list_winners()))
    document["nearest"] = {{"id", fmt::format("w{}", near->first.id)},
                           {"device", near->first.device},
                           {"problem", problem_of(near->first)},
                           {"differs", near->second}};
  return document;
}

std::string shown(const Json& value) {
  return value.is_null() ? "nothing" : value.is_string() ? value.get<std::string>() : value.dump();
}

/// Of a kernel's constants, which follow from the problem, only whether they differ.
void print_differences(const Json& list) {
  bool constants = false;
  for (const Json& one : list) {
    const std::string field = one["field"].get<std::string>();
    constants |= field.starts_with(kConstant);
    if (!field.starts_with(kConstant))
      say("    {}: wanted {}, there is {}", field, shown(one["wanted"]), shown(one["found"]));
  }
  if (constants) say("    it is for another problem (--json has each constant)");
}

void print_text(const Json& document, const Device& device, const Problem& problem,
                const Plan& plan) {
  say("{} on {} ({})", describe(problem), device.info().name, device.info().model);
  say("answered by: {} ({}), because {}", document["layer"].get<std::string>(),
      document["origin"].get<std::string>(), document["reason"].get<std::string>());
  put(plan_text(plan));
  for (const Json& one : document["candidates"]) {
    if (one["device"].get<std::string>() != device.info().key)
      say("  of {}:", device_text(one["device"].get<std::string>()));
    say("  {} has {}tokens={} sequences={}, {:.3f} of the default, driver {}: {}",
        one["layer"].get<std::string>(),
        one["other_shape"].get<bool>() ? one["family"].get<std::string>() + " " : "",
        one["tokens"].get<std::int64_t>(), one["sequences"].get<std::int64_t>(),
        one["ratio"].get<double>(), one["driver"].get<std::string>(),
        one["why"].get<std::string>());
    print_differences(one["differs"]);
  }
  if (const Json& near = document["nearest"]; !near.is_null()) {
    say("nearest winner in the cache: {}, {}", near["id"].get<std::string>(),
        near["problem"].get<std::string>());
    print_differences(near["differs"]);
  }
  for (const Json& kernel : document["kernels"]) {
    say("{} {}: {}", kernel["template"].get<std::string>(), kernel["config"].get<std::string>(),
        kernel.value("shipped", false) ? "shipped"
        : kernel["cached"].get<bool>() ? "compiled"
                                       : "not compiled yet");
    if (kernel.contains("problem")) say("    {}", kernel["problem"].get<std::string>());
    if (!kernel.contains("nearest")) continue;
    say("  nearest compiled: {}", kernel["nearest"]["artifact"].get<std::string>().substr(0, 12));
    print_differences(kernel["nearest"]["differs"]);
  }
}

int execute(const Flags& flags, bool json) {
  const Selection selection = select(flags.selection, flags.options);
  const Device device = open_device(flags.device);
  const Problem& problem = selection.problem;
  const auto cache = std::make_shared<Cache>();
  const auto all = CachePlanSource(cache).contenders(
      device.info(), problem_key(problem),
      [&](const Plan& plan) { return plan_problem(problem, plan, device.impl().target()); });
  const Answer answer = answer_of(all, device, problem);
  const Json document = explain(*cache, device, problem, all, answer);
  if (json)
    print_document(document);
  else
    print_text(document, device, problem, answer.plan);
  return kDone;
}

}  // namespace

void add_cache_explain(Command& command, CLI::App& cache) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& verb = command.action(cache, "explain", "which plan a problem gets, and why",
                                  [flags](bool json) { return execute(*flags, json); });
  add_selection(verb, flags->selection);
  add_device(verb, flags->device);
  add_options(verb, flags->options);
}

}  // namespace wyvern::cli
