// The laboratory against a worker that misbehaves on request, with builds that compile nothing.
#include <gtest/gtest.h>

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <thread>

#include "autotune/blame.hpp"
#include "autotune/loop.hpp"
#include "autotune/synthetic_space.hpp"
#include "autotune/worker_laboratory.hpp"

namespace wyvern {
namespace {

class FakeBuilder final : public Builder {
 public:
  std::string key(const KernelSpec& spec) override {
    return version + spec.template_id + spec.config.to_string();
  }
  Built build(const KernelSpec& spec) override {
    if (spec.config.to_string() == broken) {
      ++failures;
      throw Error(ErrorKind::kCompile, spec.template_id + " does not compile");
    }
    if (spec.config.to_string() == shaky && failures++ == 0)
      throw Error(ErrorKind::kCompile, spec.template_id + " does not compile now");
    if (spec.config.to_string() == starved)
      throw Error(ErrorKind::kCompile, "cannot open /proc/self/fd/9: Too many open files");
    if (spec.config.to_string() == unlinked)
      throw Error(ErrorKind::kIo, "it cannot be linked for want of a pipe");
    if (spec.config.to_string() == swollen) throw std::bad_alloc();
    Built built;
    built.artifact_key = key(spec);
    built.compiled = true;
    built.threads = 128;
    built.resources.registers = spec.config.to_string() == greedy ? 600 : 100;
    built.resources.spill_bytes = spec.config.to_string() == spilling ? 4096 : 0;
    ++builds;
    return built;
  }
  std::string version = "1", broken, greedy, spilling, shaky, starved, unlinked, swollen;
  std::atomic<int> builds{0}, failures{0};
};

class LaboratoryTest : public testing::Test {
 protected:
  LaboratoryTest() { std::filesystem::create_directories(directory_); }
  ~LaboratoryTest() override { std::filesystem::remove_all(directory_); }

  LaboratoryOptions options() const {
    LaboratoryOptions options;
    options.worker_command = {WYVERN_FAKE_WORKER, (directory_ / "log").string()};
    options.open = {{"open", nlohmann::json::object()}};
    options.device = "device";
    options.driver = "1.0";
    options.problem = "problem";
    options.jobs = 2;
    options.overlap = true;
    options.registers_per_block = 65536;
    // However slow the machine is: the limit of a test's time is the runner's.
    options.first_timeout_s = options.least_timeout_s = 3600;
    return options;
  }
  /// For what never answers.
  LaboratoryOptions impatient() const {
    LaboratoryOptions with = options();
    with.first_timeout_s = 0.2;
    return with;
  }
  WorkerLaboratory laboratory(LaboratoryOptions with) {
    return WorkerLaboratory(space_, builder_, cache_, std::move(with));
  }
  /// Index of the config x, y in its group.
  static Candidate at(std::size_t group, std::size_t x, std::size_t y) {
    return {group, 4 * x + y};
  }
  Outcome measured(WorkerLaboratory& with, const Candidate& candidate) {
    return with.measure(candidate, 0).value();
  }
  int logged(const std::string& word) const {
    std::ifstream log(directory_ / "log");
    int count = 0;
    for (std::string line; std::getline(log, line);) count += line == word ? 1 : 0;
    return count;
  }
  MeasurementRow row(const Candidate& candidate) const {
    const Group& group = space_.groups[candidate.group];
    return cache_
        .find_measurement("device", "problem", group.template_id,
                          group.configs[candidate.config].to_string())
        .value();
  }

  std::filesystem::path directory_ =
      std::filesystem::path(testing::TempDir()) /
      fmt::format("wyvern-laboratory-{}-{}", getpid(),
                  testing::UnitTest::GetInstance()->current_test_info()->name());
  SearchSpace space_ = synthetic_space();
  FakeBuilder builder_;
  Cache cache_{directory_ / "cache"};
};

/// As synthetic_space(), with y up to 13, so that every misbehaviour has a config.
SearchSpace wide_space() {
  SearchSpace space = synthetic_space();
  for (Group& group : space.groups)
    for (std::int64_t y = 4; y < 14; ++y)
      group.configs.push_back({{"BT", group.BT}, {"x", std::int64_t{0}}, {"y", y}});
  return space;
}
constexpr std::size_t kWide = 16 - 4;  // index of y in the added ones, less 4

TEST_F(LaboratoryTest, TimesAndStores) {
  auto lab = laboratory(options());
  const Outcome outcome = measured(lab, at(0, 2, 0));
  EXPECT_EQ(outcome.status, Status::ok);
  EXPECT_EQ(outcome.samples, (std::vector<double>{12, 12, 12}));
  EXPECT_EQ(row(at(0, 2, 0)).status, "ok");
  EXPECT_EQ(row(at(0, 2, 0)).median_us, 12);
  EXPECT_EQ(row(at(0, 2, 0)).driver, "1.0");
}

TEST_F(LaboratoryTest, ItKnowsHowMuchThePaceHasChanged) {
  auto lab = laboratory(options());
  for (std::size_t x = 0; x < 2; ++x) {
    EXPECT_EQ(lab.pace_change(), 0);
    for (int i = 0; i < 8; ++i) measured(lab, at(0, 2 * x, 0));
  }
  EXPECT_NEAR(lab.pace_change(), 22.0 / 20.0 - 1, 1e-12);  // the fake's pace goes with its cost
}

TEST_F(LaboratoryTest, RowsTellTheClockAtEachSample) {
  auto lab = laboratory(options());
  measured(lab, at(0, 2, 0));
  measured(lab, at(0, 1, 0));
  EXPECT_EQ(row(at(0, 2, 0)).clocks_mhz, (std::vector<double>{1712, 1722, 1717}));
  EXPECT_EQ(row(at(0, 2, 0)).setting.clock_mhz, 1717);
  const std::vector<Candidate> heat{at(0, 1, 0), at(0, 2, 0)};
  const auto raced = lab.race(heat, 1);
  ASSERT_TRUE(raced.has_value());
  EXPECT_EQ((*raced)[1].clocks_mhz, (std::vector<double>{1722, 1732, 1727}));
  const std::vector<Plan> plans{plan_of(space_, heat[0])};
  const auto compared = lab.compare(plans, 1);
  EXPECT_EQ(compared.at(0).clocks_mhz.size(), compared.at(0).samples.size());
}

TEST_F(LaboratoryTest, EachMisbehaviourIsSeenTwiceAndCostsOneRow) {
  space_ = wide_space();
  auto lab = laboratory(options());
  const Outcome crash = measured(lab, at(0, 0, 1));
  EXPECT_EQ(crash.status, Status::crashed);
  EXPECT_NE(crash.detail.find("signal 11"), std::string::npos) << crash.detail;
  EXPECT_NE(crash.detail.find("about to crash"), std::string::npos) << crash.detail;
  EXPECT_EQ(measured(lab, at(0, 0, 0)).status, Status::ok);
  EXPECT_EQ(logged("start"), 3);

  const Outcome garbage = measured(lab, at(0, 0, 3));
  EXPECT_EQ(garbage.status, Status::crashed);
  EXPECT_NE(garbage.detail.find("no JSON"), std::string::npos) << garbage.detail;
  const Outcome wrong = measured(lab, {0, kWide + 4});
  EXPECT_EQ(wrong.status, Status::wrong);
  EXPECT_EQ(wrong.detail, "NaN");
  EXPECT_TRUE(std::isinf(wrong.error));
  EXPECT_EQ(logged("start"), 5);  // wrong needs neither a new worker nor a second look
  EXPECT_EQ(measured(lab, {0, kWide + 5}).status, Status::crashed);
  EXPECT_EQ(measured(lab, {0, kWide + 6}).status, Status::crashed);
  EXPECT_EQ(measured(lab, {0, kWide + 11}).status, Status::illegal);
  EXPECT_EQ(measured(lab, at(0, 2, 0)).status, Status::ok);
  EXPECT_EQ(logged("start"), 10);  // a refusal leaves the worker that answered last

  EXPECT_EQ(row(at(0, 0, 1)).status, "crashed");
  EXPECT_EQ(row({0, kWide + 4}).status, "wrong");
  EXPECT_EQ(row({0, kWide + 11}).status, "illegal");
  EXPECT_EQ(cache_.measurements("device", "problem").size(), 8U);
}

TEST_F(LaboratoryTest, AWorkerThatHangsIsKilledTwice) {
  auto lab = laboratory(impatient());
  EXPECT_EQ(measured(lab, at(0, 0, 2)).status, Status::timeout);
  EXPECT_EQ(logged("start"), 2);
  EXPECT_EQ(row(at(0, 0, 2)).status, "timeout");
}

TEST_F(LaboratoryTest, FailuresOfTheMachineAreNoRows) {
  space_ = wide_space();
  auto lab = laboratory(options());
  const Outcome killed = measured(lab, {0, kWide + 8});
  EXPECT_EQ(killed.status, Status::unjudged);
  EXPECT_NE(killed.detail.find("signal 9"), std::string::npos) << killed.detail;
  EXPECT_EQ(measured(lab, {0, kWide + 9}).status, Status::unjudged);
  EXPECT_EQ(measured(lab, {0, kWide + 10}).status, Status::unjudged);
  EXPECT_TRUE(cache_.measurements("device", "problem").empty());
  EXPECT_FALSE(lab.recall({0, kWide + 8}).has_value());

  builder_.starved = space_.groups[0].configs[4].to_string();
  builder_.unlinked = space_.groups[0].configs[8].to_string();
  builder_.swollen = space_.groups[0].configs[12].to_string();
  auto other = laboratory(options());
  for (const std::size_t config : {4, 8, 12})
    EXPECT_EQ(measured(other, {0, config}).status, Status::unjudged) << config;
  EXPECT_TRUE(cache_.measurements("device", "problem").empty());
}

TEST_F(LaboratoryTest, AConfigThatFailsOnlyOnceHasNotFailed) {
  space_ = wide_space();
  auto lab = laboratory(options());
  const Outcome outcome = measured(lab, {0, kWide + 12});
  EXPECT_EQ(outcome.status, Status::ok) << outcome.detail;
  EXPECT_EQ(logged("start"), 2);
  EXPECT_EQ(row({0, kWide + 12}).status, "ok");

  builder_.shaky = space_.groups[0].configs[8].to_string();
  auto other = laboratory(options());
  EXPECT_EQ(measured(other, {0, 8}).status, Status::ok);
  EXPECT_EQ(builder_.failures, 2);
}

/// For as long as it lives this process can open no file.
class NoDescriptors {
 public:
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
};

TEST_F(LaboratoryTest, NoFailureIsHeldAgainstAConfigWhereDescriptorsAreShort) {
  builder_.broken = space_.groups[0].configs[4].to_string();
  auto lab = laboratory(options());
  {
    const NoDescriptors none;
    const Outcome outcome = measured(lab, {0, 4});
    EXPECT_EQ(outcome.status, Status::unjudged);
    EXPECT_NE(outcome.detail.find("descriptors"), std::string::npos) << outcome.detail;
  }
  EXPECT_TRUE(cache_.measurements("device", "problem").empty());
  EXPECT_EQ(measured(lab, {0, 4}).status, Status::failed);
  EXPECT_EQ(row({0, 4}).status, "failed");
}

TEST(Blame, TellsTheMachinesFailuresFromAConfigs) {
  const auto of = [](ErrorKind kind, const std::string& text, bool on_cpu) {
    return blame(Error(kind, text), on_cpu);
  };
  EXPECT_EQ(of(ErrorKind::kCompile, "no match for operator", true), Status::failed);
  EXPECT_EQ(of(ErrorKind::kBadInput, "BT is 7", true), Status::illegal);
  EXPECT_EQ(of(ErrorKind::kUnavailable, "asks for 300000 bytes of shared memory", false),
            Status::illegal);
  EXPECT_EQ(of(ErrorKind::kUnavailable, "fwd_h.cpu cannot be loaded", true), Status::unjudged);
  EXPECT_EQ(of(ErrorKind::kIo, "cannot be linked for want of a pipe", true), Status::unjudged);
  EXPECT_EQ(of(ErrorKind::kUnavailable,
               "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)", false),
            Status::unjudged);
  for (const int error : {EMFILE, ENFILE, ENOMEM, ENOSPC})
    EXPECT_EQ(of(ErrorKind::kCompile, std::string("ld.lld: ") + std::strerror(error), true),
              Status::unjudged);
  EXPECT_TRUE(own_fault(SIGSEGV));
  EXPECT_FALSE(own_fault(SIGKILL));
  EXPECT_EQ(shortage(), "");
}

TEST_F(LaboratoryTest, ConfigsThatDoNotCompileOrFitAreNotRun) {
  builder_.broken = space_.groups[0].configs[4].to_string();
  builder_.greedy = space_.groups[0].configs[8].to_string();
  builder_.spilling = space_.groups[0].configs[12].to_string();
  auto lab = laboratory(options());
  EXPECT_EQ(measured(lab, {0, 4}).status, Status::failed);
  EXPECT_EQ(builder_.failures, 2);
  EXPECT_EQ(measured(lab, {0, 8}).status, Status::illegal);
  EXPECT_EQ(logged("start"), 0);
  EXPECT_EQ(measured(lab, {0, 0}).status, Status::ok);
  EXPECT_EQ(measured(lab, {0, 12}).status, Status::rejected);
  EXPECT_EQ(logged("measure"), 1);
  EXPECT_EQ(row({0, 4}).status, "failed");
  EXPECT_NE(row({0, 12}).detail.find("4096"), std::string::npos);
}

TEST_F(LaboratoryTest, ASpillingConfigRunsWhereNoOtherIsKnownToDoWithout) {
  builder_.spilling = space_.groups[0].configs[0].to_string();
  auto lab = laboratory(options());
  EXPECT_EQ(measured(lab, {0, 0}).status, Status::ok);
}

TEST_F(LaboratoryTest, RowsAreRecalledUnlessDriverOrKernelChanged) {
  {
    auto lab = laboratory(options());
    measured(lab, at(0, 0, 0));
    measured(lab, at(0, 0, 1));
  }
  auto lab = laboratory(options());
  EXPECT_EQ(lab.recall(at(0, 0, 0))->samples.size(), 3U);
  EXPECT_EQ(lab.recall(at(0, 0, 1))->status, Status::crashed);
  EXPECT_FALSE(lab.recall(at(0, 1, 0)).has_value());
  LaboratoryOptions newer = options();
  newer.driver = "2.0";
  EXPECT_FALSE(laboratory(newer).recall(at(0, 0, 0)).has_value());
  LaboratoryOptions longer = options(), elsewhere = options(), another = options();
  longer.setting.T = 2048;  // in the same bucket
  elsewhere.setting.host = "other";
  another.setting.unit = "GPU-2";
  for (const LaboratoryOptions& other : {longer, elsewhere, another}) {
    EXPECT_FALSE(laboratory(other).recall(at(0, 0, 0)).has_value());
    // A row of its own, beside the first.
    auto own = laboratory(other);
    measured(own, at(0, 0, 0));
    EXPECT_TRUE(own.recall(at(0, 0, 0)).has_value());
    EXPECT_TRUE(laboratory(options()).recall(at(0, 0, 0)).has_value());
  }
  EXPECT_EQ(row(at(0, 0, 0)).setting.regime, "8 launches a sample, warm");
  builder_.version = "2";
  EXPECT_FALSE(laboratory(options()).recall(at(0, 0, 0)).has_value());
}

TEST_F(LaboratoryTest, ASecondSearchStartsNoWorkerAndBuildsNothing) {
  LoopLimits limits;
  limits.elapsed_s = [] { return 0.0; };
  limits.deadline_s = 1;
  // Of the misbehaving, some crashes and one hang are enough.
  for (Group& group : space_.groups)
    std::erase_if(group.configs, [](const Config& config) { return config.integer("y") > 1; });
  space_.groups[0].configs.push_back(
      {{"BT", std::int64_t{64}}, {"x", std::int64_t{0}}, {"y", std::int64_t{2}}});
  Results first(space_), second(space_);
  {
    auto lab = laboratory(impatient());
    measured(lab, {0, space_.groups[0].configs.size() - 1});
  }
  {
    auto lab = laboratory(options());
    EXPECT_TRUE(run_search(space_, Search(space_, true), lab, limits, first).complete);
  }
  const TuneCounts counts = count(space_, first);
  EXPECT_EQ(counts.timeout, 1);
  EXPECT_EQ(counts.ok, 32);
  EXPECT_EQ(counts.crashed, 32);
  const int builds = builder_.builds, starts = logged("start");
  auto lab = laboratory(options());
  EXPECT_TRUE(run_search(space_, Search(space_, true), lab, limits, second).complete);
  EXPECT_EQ(builder_.builds, builds);
  EXPECT_EQ(logged("start"), starts);
  EXPECT_EQ(count(space_, second).reused, counts.space);
  EXPECT_EQ(best_plans(space_, second, 1)[0].plan, best_plans(space_, first, 1)[0].plan);
}

TEST_F(LaboratoryTest, AllConfigsOfAGroupAreRepeatedAlike) {
  auto lab = laboratory(options());
  measured(lab, at(0, 0, 0));  // 10 us
  measured(lab, at(0, 3, 0));
  measured(lab, at(1, 2, 0));
  EXPECT_EQ(logged("repeats 0"), 2);  // the first of each group
  EXPECT_EQ(logged("repeats 8"), 1);
  auto later = laboratory(options());
  later.recall(at(0, 0, 0));
  measured(later, at(0, 2, 0));
  EXPECT_EQ(logged("repeats 8"), 2);
}

TEST_F(LaboratoryTest, RacesAndLeavesRowsAloneWhereTheWorkerDies) {
  space_ = wide_space();
  auto lab = laboratory(options());
  const std::vector<Candidate> sound{at(0, 0, 0), at(0, 1, 0)};
  const auto samples = lab.race(sound, 0.1);
  ASSERT_TRUE(samples.has_value());
  EXPECT_EQ((*samples)[0].samples, (std::vector<double>{20, 20, 20}));
  EXPECT_EQ((*samples)[1].samples, (std::vector<double>{21, 21, 21}));
  EXPECT_EQ(logged("race"), 1);
  const std::vector<Candidate> fatal{at(0, 0, 0), {0, kWide + 7}};
  const auto none = lab.race(fatal, 0.1);
  ASSERT_TRUE(none.has_value());
  EXPECT_TRUE((*none)[0].samples.empty() && (*none)[1].samples.empty());
  EXPECT_EQ(measured(lab, at(0, 2, 0)).status, Status::ok);
}

TEST_F(LaboratoryTest, ComparesAndLeavesOutThePlanThatCrashes) {
  space_ = wide_space();
  auto lab = laboratory(options());
  const Config good{{"x", std::int64_t{1}}, {"y", std::int64_t{0}}};
  const Config bad{{"x", std::int64_t{0}}, {"y", std::int64_t{7}}};
  const Config shaken{{"x", std::int64_t{3}}, {"y", std::int64_t{13}}};
  const std::vector<Plan> plans{
      {{"a", good}}, {{"a", good}, {"b", bad}}, {{"c", good}}, {{"c", shaken}}};
  const auto timings = lab.compare(plans, 0.1);
  ASSERT_EQ(timings.size(), 4U);
  EXPECT_EQ(timings[0].status, Status::ok);
  EXPECT_EQ(timings[0].samples.front(), 11);
  EXPECT_EQ(timings[1].status, Status::crashed);
  EXPECT_NE(timings[1].detail.find("signal 6"), std::string::npos) << timings[1].detail;
  EXPECT_EQ(timings[2].status, Status::ok);
  EXPECT_EQ(timings[3].status, Status::ok);  // a crash that does not come again
  EXPECT_EQ(timings[3].samples.front(), 13);
}

TEST_F(LaboratoryTest, AWorkerThatCannotOpenIsAnError) {
  LaboratoryOptions refused = options();
  refused.worker_command.push_back("refuse");
  auto lab = laboratory(refused);
  try {
    lab.measure(at(0, 0, 0), 0);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    EXPECT_NE(std::string(error.what()).find("no such device"), std::string::npos);
  }
  LaboratoryOptions absent = options();
  absent.worker_command = {"/nonexistent/worker"};
  auto other = laboratory(absent);
  EXPECT_THROW(other.measure(at(0, 0, 0), 0), Error);
}

TEST_F(LaboratoryTest, AnInterruptionEndsAWaitAndStoresNothing) {
  std::atomic<bool> flag{false};
  LaboratoryOptions patient = options();
  patient.first_timeout_s = 60;
  patient.interrupted = [&] { return flag.load(); };
  auto lab = laboratory(patient);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    flag = true;
  });
  EXPECT_FALSE(lab.measure(at(0, 0, 2), 0).has_value());
  later.join();
  EXPECT_TRUE(cache_.measurements("device", "problem").empty());
}

TEST(CompileAheadTest, WithoutOverlapNothingIsBuiltOutsideAWait) {
  FakeBuilder builder;
  CompileAhead ahead(builder, 2, false);
  std::vector<KernelSpec> specs;
  for (std::int64_t i = 0; i < 20; ++i) specs.push_back({"a", {}, {{"x", i}}});
  ahead.announce(specs);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(builder.builds, 0);
  EXPECT_TRUE(ahead.wait(specs[0], {})->built.has_value());
  EXPECT_EQ(builder.builds, 8);  // a batch
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_TRUE(ahead.wait(specs[7], {})->built.has_value());
  EXPECT_EQ(builder.builds, 8);
  EXPECT_TRUE(ahead.wait(specs[19], {})->built.has_value());
  EXPECT_EQ(builder.builds, 16);
  EXPECT_EQ(ahead.compiled(), 16);
}

TEST(CompileAheadTest, WithOverlapEverythingAnnouncedIsBuiltOnce) {
  FakeBuilder builder;
  CompileAhead ahead(builder, 4, true);
  std::vector<KernelSpec> specs;
  for (std::int64_t i = 0; i < 50; ++i) specs.push_back({"a", {}, {{"x", i % 25}}});
  ahead.announce(specs);
  for (const KernelSpec& spec : specs) EXPECT_TRUE(ahead.wait(spec, {})->built.has_value());
  EXPECT_EQ(builder.builds, 25);
}

}  // namespace
}  // namespace wyvern
