#include "tools/wyvern/report.hpp"

#include <wyvern/config.hpp>
#include <wyvern/error.hpp>
#include <wyvern/problem.hpp>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <unistd.h>

#include "autotune/floor.hpp"
#include "autotune/protocol.hpp"
#include "cache/rows.hpp"
#include "runtime/base/json_text.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/operators/operator.hpp"
#include "tools/wyvern/cache_rows.hpp"
#include "tools/wyvern/report_assets.hpp"

namespace wyvern::cli {
namespace {

constexpr std::size_t kMostFailures = 200;

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// "BT=64,precision=tf32" as an object of numbers and texts.
Json config_json(const std::string& text) {
  Json config = Json::object();
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string piece = text.substr(at, end - at);
    at = end + 1;
    const std::size_t equals = piece.find('=');
    if (equals == piece.npos) continue;
    const std::string value = piece.substr(equals + 1);
    const bool is_number =
        !value.empty() && value.find_first_not_of("0123456789") == value.npos && value.size() < 10;
    config[piece.substr(0, equals)] = is_number ? Json(std::stoll(value)) : Json(value);
  }
  return config;
}

/// Rates of this machine's devices by their keys, found out when first asked for.
class Floors {
 public:
  /// us; 0 where the problem or its device is not known here.
  double of(const WinnerRow& row) {
    if (row.floor_us > 0) return row.floor_us;
    const Json json = parsed(row.problem);
    if (!json.is_object()) return 0;
    const Rates* rates = rates_of(row.device);
    if (rates == nullptr) return 0;
    const bool cold = row.setting.regime.ends_with("cold");
    try {
      const Problem problem = problem_from(parse_json(row.problem));
      return 1e6 * floor_time(work_of(problem), peak_of(*rates, problem, cold));
    } catch (const std::exception&) {  // a field of another Wyvern
      return 0;
    }
  }

 private:
  const Rates* rates_of(const std::string& key) {
    const auto [at, first] = rates_.try_emplace(key);
    if (first)
      for (const DeviceInfo& device : list_devices())
        if (device.key == key && device.problem.empty())
          at->second = Device::open(device.name).impl().rates();
    return at->second ? &*at->second : nullptr;
  }
  std::map<std::string, std::optional<Rates>> rates_;
};

using ProblemName = std::pair<std::string, std::string>;  ///< device, problem

/// The newest row of each config of a problem, by template and config.
using Latest = std::map<std::pair<std::string, std::string>, const MeasurementRow*>;

/// The values that configs must share to be interchangeable in a plan: chunk size and segment
/// length.
std::string interchangeable(const std::string& template_id, const std::string& config) {
  const Json values = config_json(config);
  return fmt::format("{} {} {}", template_id, values.value("BT", Json()).dump(),
                     values.value("SEG", Json()).dump());
}

Json steps_of(const WinnerRow& winner, const Latest& rows) {
  std::map<std::string, double> best;
  for (const auto& [name, row] : rows)
    if (row->status == "ok" && row->median_us > 0) {
      double& least = best[interchangeable(name.first, name.second)];
      if (least == 0 || row->median_us < least) least = row->median_us;
    }
  Json steps = Json::array();
  double at = 0;
  const Json plan = parsed(winner.plan);
  if (!plan.is_array()) return steps;
  for (const Json& step : plan) {
    if (!step.is_object()) continue;
    const std::string id = step.value("template", ""), config = step.value("config", "");
    const auto found = rows.find({id, config});
    const double us =
        found == rows.end() || found->second->status != "ok" ? 0 : found->second->median_us;
    steps.push_back({{"template", id},
                     {"config", config},
                     {"start_us", at},
                     {"us", us},
                     {"best_us", best[interchangeable(id, config)]}});
    at += us;
  }
  for (Json& step : steps) step["share"] = at > 0 ? step["us"].get<double>() / at : 0;
  return steps;
}

/// How much the steps would gain by the best configs; null where one was not measured.
Json regret_of(const Json& steps) {
  double sum = 0, best = 0;
  for (const Json& step : steps) {
    if (step["us"].get<double>() <= 0) return nullptr;
    sum += step["us"].get<double>();
    best += step["best_us"].get<double>();
  }
  return best > 0 ? Json(sum / best - 1) : Json(nullptr);
}

Json templates_of(const Latest& rows) {
  std::map<std::string, Json> by_template;
  for (const auto& [name, row] : rows) {
    Json& group = by_template[name.first];
    if (group.is_null())
      group = {{"template", name.first}, {"tunables", Json::array()}, {"rows", Json::array()}};
    Json config = config_json(name.second);
    for (const auto& [tunable, value] : config.items())
      if (std::find(group["tunables"].begin(), group["tunables"].end(), tunable) ==
          group["tunables"].end())
        group["tunables"].push_back(tunable);
    group["rows"].push_back({{"config", std::move(config)},
                             {"median_us", row->status == "ok" ? row->median_us : 0},
                             {"status", row->status}});
  }
  Json list = Json::array();
  for (auto& [id, group] : by_template) list.push_back(std::move(group));
  return list;
}

/// The clock at the winner's samples; of one that has none while the plan's steps were measured,
/// one step after another.
Json clocks_of(const WinnerRow& winner, const Json& steps, const Latest& rows) {
  if (!winner.clocks_mhz.empty()) return winner.clocks_mhz;
  Json clocks = Json::array();
  for (const Json& step : steps) {
    const auto found = rows.find({step["template"], step["config"]});
    if (found == rows.end()) continue;
    for (const double clock : found->second->clocks_mhz)
      if (clock > 0) clocks.push_back(clock);
  }
  return clocks;
}

Json problem_json(const WinnerRow& row, const Latest& rows, Floors& floors) {
  const double floor_us = floors.of(row);
  Json steps = steps_of(row, rows);
  Json regret = regret_of(steps);
  Json clocks = clocks_of(row, steps, rows);
  return {{"device", row.device},
          {"problem", problem_of(row)},
          {"tuned_us", row.median_us},
          {"default_us", row.default_us > 0 ? Json(row.default_us) : Json(nullptr)},
          {"ratio", rank_of(row)},
          {"floor_us", floor_us > 0 ? Json(floor_us) : Json(nullptr)},
          {"regret", std::move(regret)},
          {"driver", row.driver},
          {"created", row.created},
          {"setting", to_json(row.setting)},
          {"samples_us", row.samples_us},
          {"default_samples_us", row.default_samples_us},
          {"clocks_mhz", std::move(clocks)},
          {"steps", std::move(steps)},
          {"templates", templates_of(rows)}};
}

/// Facts of each device, from the rows that were measured on it.
class Provenance {
 public:
  template <class Row>
  void add(const Row& row) {
    Facts& facts = devices_[row.device];
    facts.drivers.insert(row.driver);
    const Setting& setting = row.setting;
    if (!setting.host.empty()) facts.hosts.insert(setting.host);
    if (!setting.unit.empty()) facts.units.insert(setting.unit);
    if (setting.power_limit_w > 0) facts.power_limits.insert(setting.power_limit_w);
    if (setting.clock_mhz > 0) facts.clocks.insert(setting.clock_mhz);
  }
  Json json() const {
    Json list = Json::array();
    for (const auto& [key, facts] : devices_) {
      std::vector<double> clocks;
      if (!facts.clocks.empty()) clocks.push_back(*facts.clocks.begin());
      if (facts.clocks.size() > 1) clocks.push_back(*facts.clocks.rbegin());
      list.push_back({{"key", key},
                      {"drivers", facts.drivers},
                      {"hosts", facts.hosts},
                      {"units", facts.units},
                      {"power_limits", facts.power_limits},
                      {"clocks", clocks}});
    }
    return list;
  }

 private:
  struct Facts {
    std::set<std::string> drivers, hosts, units;
    std::set<double> power_limits, clocks;
  };
  std::map<std::string, Facts> devices_;
};

Json errors_json(const std::vector<MeasurementRow>& rows) {
  std::map<std::string, std::vector<double>> errors;
  for (const MeasurementRow& row : rows)
    if (row.status == "ok") errors[row.template_id].push_back(row.error);
  Json list = Json::array();
  for (const auto& [id, values] : errors)
    list.push_back({{"template", id},
                    {"count", values.size()},
                    {"median", median_of(values)},
                    {"largest", *std::max_element(values.begin(), values.end())}});
  return list;
}

Json compile_json(const std::vector<ArtifactRow>& rows) {
  std::map<std::pair<std::string, std::string>, std::vector<double>> times;
  for (const ArtifactRow& row : rows)
    times[{row.template_id, row.target}].push_back(row.compile_ms);
  Json list = Json::array();
  for (const auto& [name, values] : times) {
    double total = 0;
    for (const double ms : values) total += ms;
    list.push_back({{"template", name.first},
                    {"target", name.second},
                    {"count", values.size()},
                    {"median_ms", median_of(values)},
                    {"longest_ms", *std::max_element(values.begin(), values.end())},
                    {"total_ms", total}});
  }
  return list;
}

void add_failures(const std::vector<MeasurementRow>& rows, Json& data) {
  std::map<std::string, std::int64_t> statuses;
  Json list = Json::array();
  std::int64_t left_out = 0;
  for (const MeasurementRow& row : rows) {
    ++statuses[row.status];
    if (row.status == "ok" || row.status == "rejected") continue;
    if (list.size() >= kMostFailures)
      ++left_out;
    else
      list.push_back({{"status", row.status},
                      {"template", row.template_id},
                      {"config", row.config},
                      {"detail", row.detail},
                      {"problem", row.problem},
                      {"created", row.created}});
  }
  data["statuses"] = statuses;
  data["failures"] = std::move(list);
  data["failures_left_out"] = left_out;
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

void replace(std::string& text, std::string_view mark, std::string_view with) {
  if (const std::size_t at = text.find(mark); at != text.npos) text.replace(at, mark.size(), with);
}

}  // namespace

Json report_data(const Cache& cache) {
  const std::vector<WinnerRow> winners = cache.list_winners();
  const std::vector<MeasurementRow> measurements = cache.list_measurements();
  const std::vector<ArtifactRow> artifacts = cache.list_artifacts();
  std::map<ProblemName, Latest> latest;
  Provenance provenance;
  for (const MeasurementRow& row : measurements) {  // newest first
    latest[{row.device, row.problem}].try_emplace({row.template_id, row.config}, &row);
    provenance.add(row);
  }
  Floors floors;
  std::map<ProblemName, Json> problems;
  for (const WinnerRow& row : winners) {
    provenance.add(row);
    const ProblemName name{row.device, problem_of(row)};
    problems[name] = problem_json(row, latest[name], floors);
  }
  Json data{{"version", WYVERN_VERSION},
            {"generated", timestamp()},
            {"host", host_name()},
            {"cache", cache.file().string()},
            {"counts",
             {{"winners", winners.size()},
              {"measurements", measurements.size()},
              {"artifacts", artifacts.size()}}},
            {"devices", provenance.json()},
            {"problems", Json::array()}};
  for (auto& [name, problem] : problems) data["problems"].push_back(std::move(problem));
  data["errors"] = errors_json(measurements);
  data["compile"] = compile_json(artifacts);
  add_failures(measurements, data);
  return data;
}

std::string report_page(const Json& data) {
  std::string json = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  // Nothing in it may end the element that it stands in, or begin a comment.
  for (std::size_t at = json.find('<'); at != json.npos; at = json.find('<', at))
    json.replace(at, 1, "\\u003c");
  std::string page(kReportPage);
  replace(page, "@STYLE@", kReportStyle);
  replace(page, "@SCRIPT@", kReportScript);
  replace(page, "@CHARTS@", kReportCharts);
  replace(page, "@DATA@", json);
  return page;
}

Json benchmark_json(const Json& data) {
  Json list = Json::array();
  const auto add = [&](const std::string& name, const Json& samples, const Json& median) {
    const Json entry{{"name", name},
                     {"run_name", name},
                     {"run_type", "iteration"},
                     {"repetitions", samples.size()},
                     {"threads", 1},
                     {"iterations", 1},
                     {"time_unit", "us"}};
    std::int64_t index = 0;
    for (const Json& sample : samples) {
      Json one = entry;
      one["repetition_index"] = index++;
      one["real_time"] = one["cpu_time"] = sample;
      list.push_back(std::move(one));
    }
    if (!median.is_number()) return;
    Json one = entry;
    one["name"] = name + "_median";
    one["run_type"] = "aggregate";
    one["aggregate_name"] = "median";
    one["aggregate_unit"] = "time";
    one["real_time"] = one["cpu_time"] = median;
    list.push_back(std::move(one));
  };
  for (const Json& problem : data["problems"]) {
    const std::string name = problem["problem"].get<std::string>();
    add(name + "/tuned", problem["samples_us"], problem["tuned_us"]);
    add(name + "/default", problem["default_samples_us"], problem["default_us"]);
  }
  return {{"context",
           {{"date", data["generated"]},
            {"host_name", data["host"]},
            {"executable", "wyvern"},
            {"library_version", data["version"]},
            {"library_build_type", "release"}}},
          {"benchmarks", std::move(list)}};
}

Json chrome_trace(const Json& data) {
  Json events = Json::array();
  int process = 0;
  for (const Json& problem : data["problems"]) {
    ++process;
    events.push_back({{"name", "process_name"},
                      {"ph", "M"},
                      {"pid", process},
                      {"args", {{"name", problem["problem"]}}}});
    for (const Json& step : problem["steps"])
      events.push_back({{"name", step["template"]},
                        {"cat", "stage"},
                        {"ph", "X"},
                        {"pid", process},
                        {"tid", 1},
                        {"ts", step["start_us"]},
                        {"dur", step["us"]},
                        {"args", {{"config", step["config"]}}}});
  }
  return {{"traceEvents", std::move(events)}, {"displayTimeUnit", "ns"}};
}

}  // namespace wyvern::cli
