// Times of whole plans on a device, beside their costs: data for the constants of costs and for
// their test.
//
//   plan_times DEVICE PROBLEMS SECONDS CACHE [I/N]
//
// For each problem of the manifest (one of `wyvern tune`; the I-th of N parts), of every cover of
// its stages and length of segments the cheapest plans by cost, with other columns in turn, are
// checked and timed in turn for so many seconds each. Prints a line of JSON for the device and one
// for each problem. Kernels are stored in CACHE: with 0 seconds several processes fill it first.
#include <wyvern/device.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "autotune/bench.hpp"
#include "autotune/protocol.hpp"
#include "autotune/space.hpp"
#include "autotune/statistics.hpp"
#include "cache/cache.hpp"
#include "runtime/devices/device_impl.hpp"
#include "templates/cost.hpp"
#include "tools/wyvern/manifest.hpp"

namespace {

using namespace wyvern;

/// How many plans are timed, and up to what cost, in those of the cheapest: the first of a cover
/// and length of segments, and those that follow it.
constexpr std::size_t kMost = 10;
constexpr double kFirst = 2, kFurther = 1.25;

struct Priced {
  Plan plan;
  double us = 0;
};

/// Of each number of columns the group's cheapest config.
std::vector<Config> choices(const Group& group, const Problem& problem, const Target& target,
                            Rows rows) {
  const Template& t = *find_template(group.template_id);
  const Workload work = work_of(problem, target, {group.BT, group.SEG}, rows);
  std::map<std::int64_t, std::pair<double, Config>> best;
  for (const Config& config : group.configs) {
    const double us = cost_of(t, Spec(group.constants, config), work, target.limits);
    const std::int64_t columns = config.contains("BV") ? config.integer("BV") : 0;
    const auto [at, is_new] = best.try_emplace(columns, us, config);
    if (!is_new && us < at->second.first) at->second = {us, config};
  }
  std::vector<Config> found;
  for (auto& [columns, priced] : best) found.push_back(std::move(priced.second));
  return found;
}

/// The layer's plans from use `first` on, behind `plan`.
void extend(const SearchSpace& space, const Layer& layer, const Problem& problem,
            const Target& target, std::size_t first, Plan& plan, std::vector<Priced>& found) {
  if (first == space.uses) {
    found.push_back({plan, plan_cost(problem, plan, target)});
    return;
  }
  const std::vector<StageUse> uses = stage_uses(problem);
  for (const Edge& edge : layer.edges) {
    if (edge.first != first) continue;
    const Group& group = space.groups[edge.group];
    for (Config& config : choices(group, problem, target, uses[first].rows)) {
      plan.push_back({group.template_id, std::move(config)});
      extend(space, layer, problem, target, edge.last, plan, found);
      plan.pop_back();
    }
  }
}

std::vector<Plan> plans_to_time(const Problem& problem, const Target& target) {
  const SearchSpace space = build_space(problem, target);
  std::vector<Priced> all;
  for (const Layer& layer : space.layers) {
    Plan plan;
    extend(space, layer, problem, target, 0, plan, all);
  }
  std::ranges::stable_sort(all, {}, &Priced::us);
  std::map<std::string, std::size_t> of_kind;
  std::vector<Plan> chosen;
  for (const Priced& one : all) {
    // Layers of other lengths of segments have the plans that split nothing too.
    if (std::ranges::find(chosen, one.plan) != chosen.end()) continue;
    const PlanShape shape = shape_of(one.plan);
    std::string kind = fmt::format("{} {}", shape.BT, shape.SEG);
    for (const PlanStep& step : one.plan) kind += " " + step.template_id;
    const bool first = of_kind[kind]++ == 0;
    if (one.us <= (first ? kFirst : kFurther) * all.front().us) chosen.push_back(one.plan);
    if (chosen.size() == kMost) break;
  }
  return chosen;
}

nlohmann::json timed(const Device& device, const cli::Selection& selection,
                     const std::shared_ptr<Cache>& cache, double seconds) {
  constexpr std::uint64_t kSeed = 5;
  const Problem& problem = selection.problem;
  const std::vector<Plan> plans = plans_to_time(problem, device.impl().target());
  Bench bench(device, problem, cache, kSeed, selection.cu_seqlens);
  const std::vector<Outcome> outcomes =
      bench.compare(plans, seconds * static_cast<double>(plans.size()), [](std::size_t) {});
  auto list = nlohmann::json::array();
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (outcomes[i].samples.empty())
      list.push_back({{"plan", to_json(plans[i])}, {"error", outcomes[i].detail}});
    else
      list.push_back({{"plan", to_json(plans[i])}, {"us", summarize(outcomes[i].samples).median}});
  }
  return {{"problem", to_json(problem)}, {"plans", std::move(list)}};
}

int run(const std::vector<std::string>& arguments) {
  const Device device = Device::open(arguments[1]);
  const Limits limits = device.impl().target().limits;
  std::ostringstream text;
  text << std::ifstream(arguments[2]).rdbuf();
  const cli::Manifest manifest = cli::parse_manifest(text.str());
  const auto cache = std::make_shared<Cache>(arguments[4]);
  const cli::Shard shard =
      arguments.size() > 5 ? cli::find_shard(arguments[5], std::getenv) : cli::Shard{};
  fmt::print("{}\n", nlohmann::json{{"device", device.info().key},
                                    {"driver", device.info().driver},
                                    {"arch", device.info().arch},
                                    {"multiprocessors", limits.multiprocessors},
                                    {"bytes_per_us", limits.bytes_per_us}}
                         .dump());
  for (std::size_t i = shard.index; i < manifest.entries.size(); i += shard.count) {
    fmt::print("{}\n",
               timed(device, manifest.entries[i].selection, cache, std::stod(arguments[3])).dump());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int count, char** values) {
  const std::vector<std::string> arguments(values, values + count);
  if (count != 5 && count != 6) {
    fmt::print(stderr, "usage: plan_times DEVICE PROBLEMS SECONDS CACHE [I/N]\n");
    return 2;
  }
  try {
    return run(arguments);
  } catch (const std::exception& error) {
    fmt::print(stderr, "plan_times: {}\n", error.what());
    return 1;
  }
}
