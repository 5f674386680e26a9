// Recordings: what is written is read again, what is damaged is refused, and searches on recorded
// spaces come close to their best.
#include <gtest/gtest.h>

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "autotune/gzip.hpp"
#include "autotune/recording.hpp"
#include "autotune/replay.hpp"
#include "autotune/synthetic_space.hpp"
#include "runtime/nearest_shape.hpp"

namespace wyvern {
namespace {

/// A recording of the synthetic space by these costs, each config one second's measuring.
Recording synthetic_recording(double (*cost)(const Group&, const Config&)) {
  SearchSpace space = synthetic_space();
  Results results(space);
  std::mt19937_64 random(7);
  for (std::size_t g = 0; g < space.groups.size(); ++g)
    for (std::size_t i = 0; i < space.groups[g].configs.size(); ++i) {
      Outcome outcome;
      const double us = cost(space.groups[g], space.groups[g].configs[i]);
      outcome.status = us > 0 ? Status::ok : Status::wrong;
      outcome.error = us > 0 ? 0.001 : INFINITY;
      outcome.measure_ms = 1000;
      for (int sample = 0; sample < 9 && us > 0; ++sample)
        outcome.samples.push_back(us * std::uniform_real_distribution<>(0.995, 1.005)(random));
      if (i % 2 == 0) outcome.resources = Resources{.registers = 40, .spill_bytes = 8};
      results.put({g, i}, outcome);
    }
  RecordingHead head;
  head.device = head.kind = "cpu";
  head.model = "none: made up";
  head.day = "2026-11-22";
  head.problem.T = 100;
  return {head, std::move(space), std::move(results)};
}

/// Not separable: what is best for y depends on x.
double coupled(const Group& group, const Config& config) {
  const auto x = static_cast<double>(config.integer("x")),
             y = static_cast<double>(config.integer("y"));
  const double base = group.template_id == "bc" ? 60 : 30;
  return base + 4 * std::fabs(x + y - 4) + std::fabs(x - 3) + (group.BT == 32 ? 0.0 : 5.0);
}

double with_failures(const Group& group, const Config& config) {
  return config.integer("x") == 1 ? 0 : coupled(group, config);
}

TEST(Gzip, RoundTripsAndReturnsOtherDataUnchanged) {
  std::string text;
  for (int i = 0; i < 100000; ++i) text += static_cast<char>(i % 251 * i % 251);
  const std::string data = gzip(text);
  EXPECT_LT(data.size(), text.size());
  EXPECT_EQ(gunzip(data), text);
  EXPECT_EQ(gunzip("plain\n"), "plain\n");
  EXPECT_EQ(gunzip(gzip("")), "");
  EXPECT_THROW(gunzip(data.substr(0, data.size() / 2)), Error);
  EXPECT_THROW(gunzip(data, 1000), Error);
}

TEST(Recording, IsReadAsItWasWritten) {
  const Recording first = synthetic_recording(with_failures);
  const std::string text = recording_text(first.head, first.space, first.results);
  const Recording second = recording_from(gzip(text));
  EXPECT_TRUE(recording_text(second.head, second.space, second.results) == text);
  ASSERT_EQ(second.space.size(), first.space.size());
  EXPECT_EQ(second.space.default_plan, first.space.default_plan);
  EXPECT_EQ(second.head.problem.T, 100);
  EXPECT_EQ(second.results.find({0, 5})->status, Status::wrong);
  EXPECT_TRUE(std::isinf(second.results.find({0, 5})->error));
  EXPECT_NEAR(second.results.timing({0, 0}).median, first.results.timing({0, 0}).median, 0.001);
  EXPECT_EQ(second.results.resources({0, 2})->registers, 40);
  EXPECT_EQ(recorded_best(second), recorded_best(first));
}

TEST(Recording, RefusesDamagedFiles) {
  const Recording good = synthetic_recording(coupled);
  const std::string text = recording_text(good.head, good.space, good.results);
  const auto refused = [](const std::string& damaged, const char* word) {
    try {
      recording_from(damaged);
      ADD_FAILURE() << "taken: " << damaged.substr(0, 80);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refused("", "too early");
  refused("{}\n", "line 1");
  refused("{\"wyvern_tuning\":99}\n", "format is 99");
  refused(text.substr(0, text.find('\n') + 1), "too early");
  refused(text + "{\"g\":1000,\"c\":\"\"}\n", "no group 1000");
  std::string lost = text;
  lost.erase(lost.rfind("\n{\"c\":\"BT=32,x=0,y=0\""));
  refused(lost, "default");
}

TEST(Replay, FindsTheBestOfASpaceThatIsNotSeparable) {
  const Recording recording = synthetic_recording(coupled);
  ReplayOptions options;
  options.budget_s = 1000;
  for (const bool sweep : {false, true}) {
    options.sweep = sweep;
    const ReplayReport report = replay(recording, options);
    EXPECT_LE(report.regret_mean, 0.01);
    EXPECT_LE(report.regret_p95, 0.03);
    EXPECT_GE(report.within_percent, 0.95);
    EXPECT_GT(report.default_over_best, 1.3);
    EXPECT_LT(report.seconds_to_5_percent, report.exhaustive_s / 2);
  }
  options.budget_s = 20;  // a sixth of what there is
  const ReplayReport brief = replay(recording, options);
  EXPECT_LE(brief.measured, 20);
  EXPECT_EQ(brief.exhaustive, 0);
  EXPECT_LT(brief.regret_mean, 0.7 * (brief.default_over_best - 1));
}

TEST(Replay, KnowsAPlansTime) {
  const Recording recording = synthetic_recording(with_failures);
  const Plan best = recorded_best(recording);
  const double us = recorded_us(recording, best).value();
  EXPECT_LT(us, recorded_us(recording, recording.space.default_plan).value());
  Plan other = best;
  other.front().template_id = "absent";
  EXPECT_FALSE(recorded_us(recording, other).has_value());
  Plan failed = best;
  for (PlanStep& step : failed) step.config.set("x", std::int64_t{1});
  EXPECT_FALSE(recorded_us(recording, failed).has_value());
  Plan part = best;
  part.pop_back();
  EXPECT_FALSE(recorded_us(recording, part).has_value());
}

Recording read_recording(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream data;
  data << file.rdbuf();
  return recording_from(data.str());
}

std::vector<Recording> recordings() {
  std::vector<Recording> found;
  for (const auto& entry : std::filesystem::directory_iterator(WYVERN_RECORDINGS))
    if (entry.path().extension() == ".gz") found.push_back(read_recording(entry.path()));
  return found;
}

// The plan of a shape nearby, where it would be used for one that was not tuned.
TEST(Replay, PlansOfNearShapesAreNoWorseThanTheDefault) {
  const std::vector<Recording> all = recordings();
  int carried = 0;
  for (const Recording& from : all)
    for (const Recording& to : all) {
      if (&from == &to || from.head.key != to.head.key) continue;
      const auto distance =
          tuning_distance(problem_key(to.head.problem), problem_key(from.head.problem));
      const Plan plan = recorded_best(from);
      const double gained =
          recorded_us(from, plan).value() / recorded_us(from, from.space.default_plan).value();
      if (!distance || !carries_over(gained, *distance)) continue;
      const auto us = recorded_us(to, plan);
      if (!us) continue;  // not legal there: the default takes its place
      ++carried;
      EXPECT_LE(*us, 1.01 * recorded_us(to, to.space.default_plan).value())
          << problem_key(from.head.problem).to_string() << " for "
          << problem_key(to.head.problem).to_string();
    }
  EXPECT_GT(carried, 0);
}

class RecordedSpace : public ::testing::TestWithParam<std::string> {};

TEST_P(RecordedSpace, IsSearchedToItsBest) {
  const Recording recording = read_recording(std::filesystem::path(WYVERN_RECORDINGS) / GetParam());
  ReplayOptions options;
  if (std::getenv("WYVERN_TESTS_FULL") == nullptr) options.seeds = 5;
  const ReplayReport report = replay(recording, options);
  fmt::print("{} configs, regret {:.2f}% (95%: {:.2f}%), within 1% {:.0f}%, 5% after {:.1f} s\n",
             report.configs, 100 * report.regret_mean, 100 * report.regret_p95,
             100 * report.within_percent, report.seconds_to_5_percent);
  // Of a shared processor the samples scatter so that sums of medians are off by percents.
  const bool cpu = recording.head.kind == "cpu";
  EXPECT_LE(report.regret_mean, cpu ? 0.03 : 0.01);
  EXPECT_LE(report.regret_p95, cpu ? 0.09 : 0.03);
  if (!cpu) {
    EXPECT_GE(report.within_percent, 0.98);
  }
}

std::vector<std::string> recording_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(WYVERN_RECORDINGS))
    if (entry.path().extension() == ".gz") names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Recordings, RecordedSpace, ::testing::ValuesIn(recording_names()),
                         [](const auto& each) {
                           std::string name = each.param.substr(0, each.param.find('.'));
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace wyvern
