#include <wyvern/error.hpp>

#include <algorithm>
#include <set>

#include "autotune/replay.hpp"
#include "runtime/nearest_shape.hpp"
#include "tools/wyvern/file.hpp"
#include "tools/wyvern/tune.hpp"

namespace wyvern::cli {
namespace {

Recording read_recording(const std::string& path) {
  const InputFile file(path);
  std::string data(file.bytes(), '\0');
  file.read(0, data.data(), data.size());
  try {
    return recording_from(data);
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{}: {}", path, error.what()));
  }
}

/// How a recording's best plan does at another's problem.
struct Transfer {
  std::size_t from = 0, to = 0;
  double over_best = 0, over_default = 0;
  double distance = 0;   ///< below 0: their kernels are not the same
  bool carried = false;  ///< a runtime would use it if nothing else is tuned
};

/// For each pair of recordings of one kind of device whose spaces have each other's plans.
std::vector<Transfer> transfers(const std::vector<Recording>& recordings) {
  std::vector<Transfer> found;
  for (std::size_t from = 0; from < recordings.size(); ++from)
    for (std::size_t to = 0; to < recordings.size(); ++to) {
      if (from == to || recordings[from].head.key != recordings[to].head.key) continue;
      const auto us = recorded_us(recordings[to], recorded_best(recordings[from]));
      const auto otherwise = recorded_us(recordings[to], recordings[to].space.default_plan);
      if (!us || !otherwise) continue;
      const double best = recorded_us(recordings[to], recorded_best(recordings[to])).value();
      const Recording& source = recordings[from];
      const double gained = recorded_us(source, recorded_best(source)).value() /
                            recorded_us(source, source.space.default_plan).value_or(0);
      const auto distance = tuning_distance(problem_key(recordings[to].head.problem),
                                            problem_key(source.head.problem));
      found.push_back({from, to, *us / best, *us / *otherwise, distance.value_or(-1),
                       distance && carries_over(gained, *distance)});
    }
  return found;
}

Json to_json(const ReplayReport& r) {
  return {{"regret", {{"mean", r.regret_mean}, {"p95", r.regret_p95}, {"max", r.regret_max}}},
          {"same_winner", r.same_winner},
          {"within_1_percent", r.within_percent},
          {"seconds_to_5_percent", r.seconds_to_5_percent},
          {"seconds", r.seconds},
          {"measured", r.measured},
          {"exhaustive", r.exhaustive}};
}

struct Replayed {
  Recording recording;
  ReplayReport tuning, local;  ///< within the budget; the local search alone
};

Json to_json(const std::string& file, const Replayed& r) {
  return {{"file", file},
          {"device", r.recording.head.kind},
          {"model", r.recording.head.model},
          {"day", r.recording.head.day},
          {"problem", problem_key(r.recording.head.problem).to_string()},
          {"configs", r.tuning.configs},
          {"exhaustive_seconds", r.tuning.exhaustive_s},
          {"default_over_best", r.tuning.default_over_best},
          {"tuning", to_json(r.tuning)},
          {"local_search", to_json(r.local)}};
}

void add_rows(Table& table, const std::string& file, const Replayed& r) {
  const auto percent = [](double share) { return fmt::format("{:.2f}%", 100 * share); };
  for (const auto& [name, report] : {std::pair{"tuning", &r.tuning}, {"local search", &r.local}})
    table.row({file, name, fmt::format("{}", report->configs),
               fmt::format("{:.0f}", report->measured), percent(report->regret_mean),
               percent(report->regret_p95), percent(report->same_winner),
               percent(report->within_percent), fmt::format("{:.1f}", report->seconds_to_5_percent),
               fmt::format("{:.1f}", report->seconds)});
}

}  // namespace

int replay_recordings(const TuneFlags& flags, bool json) {
  ReplayOptions options;
  options.budget_s = parse_seconds("--budget", flags.budget);
  options.seeds = static_cast<int>(parse_integer("--seeds", flags.seeds, 1, 10000));
  std::vector<Recording> recordings;
  for (const std::string& path : flags.replay) recordings.push_back(read_recording(path));
  const std::vector<Transfer> carried = transfers(recordings);
  Json document{{"seeds", options.seeds},
                {"budget_s", options.budget_s},
                {"drift", options.drift},
                {"replays", Json::array()},
                {"transfers", Json::array()}};
  Table table({"recording", "search", "configs", "measured", "regret", "95%", "same winner",
               "within 1%", "s to 5%", "s"});
  for (std::size_t i = 0; i < recordings.size(); ++i) {
    options.sweep = true;
    Replayed replayed{recordings[i], replay(recordings[i], options), {}};
    options.sweep = false;
    replayed.local = replay(recordings[i], options);
    document["replays"].push_back(to_json(flags.replay[i], replayed));
    add_rows(table, flags.replay[i], replayed);
  }
  Table pairs({"winner of", "used for", "over its best", "over its default", "doublings apart",
               "would be used"});
  for (const Transfer& t : carried) {
    document["transfers"].push_back({{"from", flags.replay[t.from]},
                                     {"to", flags.replay[t.to]},
                                     {"over_best", t.over_best},
                                     {"over_default", t.over_default},
                                     {"distance", t.distance < 0 ? Json() : Json(t.distance)},
                                     {"carried", t.carried}});
    pairs.row({flags.replay[t.from], flags.replay[t.to], fmt::format("{:.3f}", t.over_best),
               fmt::format("{:.3f}", t.over_default),
               t.distance < 0 ? "-" : fmt::format("{:.1f}", t.distance), t.carried ? "yes" : "no"});
  }
  if (json) {
    print_document(document);
    return kDone;
  }
  put(table.text());
  if (!carried.empty()) put('\n' + pairs.text());
  return kDone;
}

}  // namespace wyvern::cli
