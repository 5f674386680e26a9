#include "autotune/recording.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "autotune/gzip.hpp"
#include "autotune/protocol.hpp"

namespace wyvern {
namespace {

using nlohmann::json;

constexpr int kFormat = 1;

/// Five digits, more than a clock's precision.
double shortened(double value) {
  return std::isfinite(value) ? std::strtod(fmt::format("{:.5g}", value).c_str(), nullptr) : value;
}

json plan_json(const Plan& plan) {
  json steps = json::array();
  for (const PlanStep& step : plan) steps.push_back({step.template_id, step.config.to_string()});
  return steps;
}

/// Unlike plan_from(), for templates that this build may not have.
Plan read_plan(const json& steps) {
  Plan plan;
  for (const json& step : steps)
    plan.push_back({step.at(0).get<std::string>(), Values::parse(step.at(1).get<std::string>())});
  return plan;
}

json line_of(const RecordingHead& r, const SearchSpace& space) {
  json layers = json::array();
  for (const Layer& layer : space.layers) {
    json edges = json::array();
    for (const Edge& edge : layer.edges) edges.push_back({edge.first, edge.last, edge.group});
    layers.push_back({{"BT", layer.BT}, {"SEG", layer.SEG}, {"edges", std::move(edges)}});
  }
  return {{"wyvern_tuning", kFormat},
          {"device", r.device},
          {"kind", r.kind},
          {"model", r.model},
          {"key", r.key},
          {"driver", r.driver},
          {"day", r.day},
          {"problem", to_json(r.problem)},
          {"jobs", r.jobs},
          {"overlap", r.overlap},
          {"uses", space.uses},
          {"groups", space.groups.size()},
          {"layers", std::move(layers)},
          {"default_plan", plan_json(space.default_plan)}};
}

json line_of(const Group& group) {
  return {{"template", group.template_id},
          {"BT", group.BT},
          {"SEG", group.SEG},
          {"default", group.configs[group.default_config].to_string()},
          {"context", group.context},
          {"step", group.step}};
}

json line_of(const SearchSpace& space, const Results& results, const Candidate& at,
             const Outcome& outcome) {
  const Group& group = space.groups[at.group];
  json samples = json::array();
  for (const double sample : outcome.samples) samples.push_back(shortened(sample));
  json line{{"g", at.group},
            {"c", group.configs[at.config].to_string()},
            {"s", to_string(outcome.status)},
            {"us", std::move(samples)},
            {"e", shortened(outcome.error)},
            {"ms", {shortened(outcome.compile_ms), shortened(outcome.measure_ms)}}};
  if (!group.launches.empty()) {
    const Launch& launch = group.launches[at.config];
    line["l"] = {launch.blocks, launch.threads, launch.shared_bytes};
  }
  if (const auto& taken = results.resources(at))
    line["r"] = {taken->registers, taken->spill_bytes, taken->shared_bytes, taken->code_bytes};
  return line;
}

/// Reads the lines of a recording.
class Reader {
 public:
  Recording read(std::string_view text) {
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      ++line_;
      if (end > 0) take(text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    if (line_ == 0 || space_.groups.size() != groups_) fail("the file ends too early");
    check_space();
    return finished();
  }

 private:
  struct Row {
    Candidate at;
    Outcome outcome;
  };

  [[noreturn]] void fail(const std::string& why) const {
    throw Error(ErrorKind::kBadInput,
                fmt::format("line {} of the recording is not as it must be: {}", line_, why));
  }

  void take(std::string_view line) {
    try {
      const json value = json::parse(line);
      if (!begun_)
        take_head(value);
      else if (space_.groups.size() < groups_)
        take_group(value);
      else
        take_row(value);
    } catch (const json::exception& error) {
      fail(error.what());
    } catch (const Error& error) {
      fail(error.what());
    }
  }

  void take_head(const json& head) {
    if (head.at("wyvern_tuning") != kFormat)
      fail(fmt::format("its format is {}; this build reads {}", head.at("wyvern_tuning").dump(),
                       kFormat));
    begun_ = true;
    head.at("device").get_to(head_.device);
    head.at("kind").get_to(head_.kind);
    head.at("model").get_to(head_.model);
    head.at("key").get_to(head_.key);
    head.at("driver").get_to(head_.driver);
    head.at("day").get_to(head_.day);
    head.at("jobs").get_to(head_.jobs);
    head.at("overlap").get_to(head_.overlap);
    head_.problem = problem_from(head.at("problem"));
    head.at("uses").get_to(space_.uses);
    head.at("groups").get_to(groups_);
    for (const json& of : head.at("layers")) {
      Layer layer{of.at("BT").get<std::int64_t>(), of.at("SEG").get<std::int64_t>(), {}};
      for (const json& edge : of.at("edges"))
        layer.edges.push_back({edge.at(0).get<std::size_t>(), edge.at(1).get<std::size_t>(),
                               edge.at(2).get<std::size_t>()});
      space_.layers.push_back(std::move(layer));
    }
    space_.default_plan = read_plan(head.at("default_plan"));
  }

  void take_group(const json& line) {
    Group group;
    line.at("template").get_to(group.template_id);
    line.at("BT").get_to(group.BT);
    line.at("SEG").get_to(group.SEG);
    defaults_.push_back(line.at("default").get<std::string>());
    line.at("context").get_to(group.context);
    line.at("step").get_to(group.step);
    space_.groups.push_back(std::move(group));
  }

  void take_row(const json& line) {
    const auto g = line.at("g").get<std::size_t>();
    if (g >= groups_) fail(fmt::format("there is no group {}", g));
    Group& group = space_.groups[g];
    Row row{{g, group.configs.size()}, {}};
    group.configs.push_back(Values::parse(line.at("c").get<std::string>()));
    if (line.contains("l"))
      group.launches.push_back({line["l"].at(0).get<std::int64_t>(),
                                line["l"].at(1).get<std::int64_t>(),
                                line["l"].at(2).get<std::int64_t>()});
    const auto status = parse_status(line.at("s").get<std::string>());
    if (!status) fail(fmt::format("{} is no status", line.at("s").dump()));
    row.outcome.status = *status;
    line.at("us").get_to(row.outcome.samples);
    row.outcome.error = line.at("e").is_null() ? std::numeric_limits<double>::infinity()
                                               : line.at("e").get<double>();
    row.outcome.compile_ms = line.at("ms").at(0).get<double>();
    row.outcome.measure_ms = line.at("ms").at(1).get<double>();
    if (line.contains("r")) {
      const json& r = line["r"];
      Resources taken;
      taken.registers = r.at(0).get<int>();
      taken.spill_bytes = r.at(1).get<std::int64_t>();
      taken.shared_bytes = r.at(2).get<std::int64_t>();
      taken.code_bytes = r.at(3).get<std::int64_t>();
      row.outcome.resources = taken;
    }
    rows_.push_back(std::move(row));
  }

  void check_space() {
    const auto known = [&](std::size_t group) { return group < groups_; };
    for (std::size_t g = 0; g < groups_; ++g) {
      Group& group = space_.groups[g];
      const auto at = std::ranges::find(group.configs, defaults_[g], &Config::to_string);
      if (at == group.configs.end() || group.step >= group.context.size() ||
          !std::ranges::all_of(group.context, known))
        fail(fmt::format("{} lacks its default config or its context", group.template_id));
      group.default_config = static_cast<std::size_t>(at - group.configs.begin());
      if (group.launches.size() != group.configs.size()) group.launches.clear();
    }
    for (const Layer& layer : space_.layers)
      for (const Edge& edge : layer.edges)
        if (!known(edge.group) || edge.first >= edge.last || edge.last > space_.uses)
          fail("an edge leads nowhere");
  }

  Recording finished() {
    Results results(space_);
    for (Row& row : rows_) results.put(row.at, std::move(row.outcome));
    return {std::move(head_), std::move(space_), std::move(results)};
  }

  std::size_t line_ = 0;
  bool begun_ = false;
  std::size_t groups_ = 0;
  RecordingHead head_;
  SearchSpace space_;
  std::vector<std::string> defaults_;  ///< by group
  std::vector<Row> rows_;
};

}  // namespace

std::string recording_text(const RecordingHead& head, const SearchSpace& space,
                           const Results& results) {
  std::string text = line_of(head, space).dump() + '\n';
  for (const Group& group : space.groups) text += line_of(group).dump() + '\n';
  for (std::size_t g = 0; g < space.groups.size(); ++g)
    for (std::size_t i = 0; i < space.groups[g].configs.size(); ++i) {
      const Outcome* const outcome = results.find({g, i});
      if (outcome != nullptr && outcome->status != Status::unjudged)
        text += line_of(space, results, {g, i}, *outcome).dump() + '\n';
    }
  return text;
}

Recording recording_from(std::string_view data) { return Reader().read(gunzip(data)); }

}  // namespace wyvern
